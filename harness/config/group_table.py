"""`method=?` and the like: the choices of a config group as a table as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path

from espalier.harness.config.catalogue import OwnChoices, descriptions, own_choices
from espalier.harness.config.method_names import method_kind
from espalier.harness.errors import plain

#: The parts of `method=?`, by kind; the last one lists CONTROLS.
KINDS = {
    "reducer": "Reducers drop or merge visual tokens. ratio: the share removed",
    "compressor": "Compressors evict cache entries: method=NAME, or compressor=NAME with a reducer",
    "decoder": "Decoders draft and verify. ratio: the share of tokens hidden from the draft",
    "denoiser": "Denoisers drop or merge at every step of a diffusion language model",
    "control": "Controls: no reduction, random, evenly spaced or recent tokens, plain decoding",
}

#: Methods to compare with. Their bases are those of published methods.
CONTROLS = frozenset(
    (
        "none",
        "random",
        "uniform",
        "pooled",
        "downsample",
        "center",
        "random_kv",
        "uniform_kv",
        "recent_kv",
        "autoregressive",
    )
)

#: Columns of a pipe, and the fewest that the last column of a table gets.
WIDTH, NARROWEST = 80, 24


def listing(
    group: str, refused: Collection[str] | None = None, folders: Sequence[Path] = ()
) -> str:
    """Return a table of a group's choices, and a hint at further ones. Cost: one read of each file.

    Args:
        group: a folder of conf, or `anchor`.
        refused: of `method`, the choices that do not run on the model of the command; None: no model is given.
        folders: further folders of configs; those of installed plug-ins are listed as well.
    """
    listed = own_choices(group, folders)
    if group == "method":
        return _methods(refused, listed)
    if group == "benchmark":
        return _benchmarks(listed)
    every = listed.folders
    rows = [(name, every.comment(group, name)) for name in listed.all_names]
    if group in ("experiment", "anchor"):
        # Those that are made from results/papers and conf/anchors.csv.
        rows += descriptions(group).items()
    return _page((group, ""), {"": rows}, listed.notes)


def _methods(refused: Collection[str] | None, listed: OwnChoices) -> str:
    parts: dict[str, list[tuple[str, ...]]] = {title: [] for title in KINDS.values()}
    for name in listed.all_names:
        kind = "control" if name in CONTROLS else listed.kinds.get(name) or method_kind(name)
        variants = listed.folders.read_choice("method", name).get("variants", ())
        text = listed.folders.comment("method", name)
        text += f" [{', '.join(variants)}]" if variants else ""
        mark = () if refused is None else ("no" if name in refused else "yes",)
        parts[KINDS[kind or "reducer"]].append((name, *mark, text))
    head = ("method",) if refused is None else ("method", "runs")
    hints = ["method.variant=NAME: official is the released code, paper the paper's text"]
    if refused:
        hints.append("no: the same command with this method gives the reason")
    return _page((*head, "[variants, the default first]"), parts, [*hints, *listed.notes])


def _benchmarks(listed: OwnChoices) -> str:
    local = "Without a download"
    published = "Published: first python -m espalier benchmarks prefetch NAME, with a network"
    parts: dict[str, list[tuple[str, ...]]] = {local: [], published: []}
    for name in listed.all_names:
        section = listed.folders.read_choice("benchmark", name)
        samples = section["dataset"]["samples"] or section["limit"]
        needs = "".join(f"; needs {need}" for need in section["needs"])
        composed = "a batch" if section["prompt_tokens"] else "yours"
        row = (
            name,
            f"{samples:,}" if samples else composed,
            section["kind"],
            (section["title"] or listed.folders.comment("benchmark", name)) + needs,
        )
        parts[local if section["dataset"]["path"] is None else published].append(row)
    hint = "benchmark=task:NAME: any task of lmms-eval with written answers, by its own metrics"
    return _page(("benchmark", "samples", "kind", "title"), parts, [hint, *listed.notes])


def _page(
    head: Sequence[str],
    parts: Mapping[str, Sequence[Sequence[str]]],
    hints: Sequence[str] = (),
) -> str:
    """Return rows under the titles of their parts, in columns of one width, and hints."""
    # Names of files and comments are a plug-in's.
    lines = iter(_lines([[*map(plain, row)] for part in ([head], *parts.values()) for row in part]))
    page = next(lines)
    for title, rows in parts.items():
        page += (f"\n{_wrapped(title)}" if title else "") + "".join(islice(lines, len(rows)))
    return "\n".join((page, *(["".join(map(_wrapped, hints))] if hints else [])))


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows in aligned columns, the last one wrapped at the width of the terminal; numbers stand at the right."""
    columns = list(zip(*rows, strict=True))[:-1]
    widths = [max(map(len, column)) for column in columns]
    indent = sum(widths) + 2 * len(widths)
    width = max(_width() - indent, NARROWEST)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(size) if column[0] == "samples" else cell.ljust(size)
            for cell, size, column in zip(row[:-1], widths, columns, strict=True)
        ]
        first, *continuation = textwrap.wrap(row[-1], width, break_on_hyphens=False) or [""]
        text = "\n".join(
            ["  ".join((*cells, first)).rstrip(), *(" " * indent + line for line in continuation)]
        )
        lines.append(f"{text}\n")
    return lines


def _wrapped(text: str) -> str:
    return textwrap.fill(plain(text), _width(), break_on_hyphens=False) + "\n"


def _width() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns
