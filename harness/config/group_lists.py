"""`python run.py benchmark=?` lists the choices of a group of conf/; read as plain YAML, without Hydra and torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.paths import ROOT

CONF = ROOT / "conf"

_ASKED = re.compile(r"\+?(\w+)=\?")

Section = dict[str, Any]


def asked_groups(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the config groups that a command line wants listed: `benchmark` for `benchmark=?`."""
    matches = (_ASKED.fullmatch(text) for text in arguments)
    groups = (match[1] for match in matches if match)
    return tuple(group for group in groups if (CONF / group).is_dir() or group == "anchor")


def listing(group: str) -> str:
    """Return a table of a group's choices, one line each, and a hint at further ones. Cost: one read of each file."""
    names = choices(group)
    if group == "method":
        variants = (", ".join(read_choice(group, name).get("variants", ())) for name in names)
        methods = zip(names, variants, map(partial(comment, group), names), strict=True)
        hint = "method.variant=<one of its variants>: official, the released code, or paper; the first is the default"
        return f"{_table((group, 'variants', ''), [*methods])}\n{hint}\n"
    if group != "benchmark":
        files = [(name, comment(group, name)) for name in names]
        return _table((group, ""), [*files, *_without_file(group)])
    head = ("benchmark", "title", "kind", "samples", "needs")
    rows = [_line(name, read_choice(group, name)) for name in names]
    hint = "benchmark=task:<name>: any other task of lmms-eval with written answers, by its own metrics"
    return f"{_table(head, rows)}\n{hint}\n"


def _without_file(group: str) -> Iterable[tuple[str, str]]:
    """Return the configs that are made from results/papers or conf/anchors.csv, each with what it runs."""
    if group not in ("experiment", "anchor"):
        return ()
    # Brings in Hydra.
    from espalier.harness.config.name_source import descriptions

    return descriptions(group).items()


def choices(group: str) -> list[str]:
    """Return the names of a group's files."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def read_choice(group: str, name: str) -> Section:
    """Return the section of a file, merged over its defaults; `${}` stays unresolved."""
    return _read(CONF / group / f"{name}.yaml")


def comment(group: str, name: str) -> str:
    """Return the first sentence of the comment at the head of a file."""
    lines = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    count = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    words = (line.lstrip("# ") for line in lines[:count])
    text = " ".join(line for line in words if not line.startswith("@package"))
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0].rstrip(".")


def _read(path: Path) -> Section:
    entries = read_yaml(path.read_text(encoding="utf-8"), path)
    section: Section = {}
    for default in entries.pop("defaults", ["_self_"]):
        if isinstance(default, Mapping):
            # `override /benchmark: ...` is a choice from another group.
            continue
        section = merged(section, entries if default == "_self_" else _read(_file(default, path)))
    return section


def _file(default: str, path: Path) -> Path:
    """Return the file that an entry of a defaults list names: in the folder of `path`, or from the top of conf/."""
    name = default.partition("@")[0]
    folder = CONF if name.startswith("/") else path.parent
    return folder / f"{name.lstrip('/')}.yaml"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Section:
    """Return the table `below`, overridden by the entries of `above`; tables within it are merged as well."""
    tables = {key: merged(below[key], above[key]) for key in above if _tables(below, above, key)}
    return {**below, **above, **tables}


def _tables(below: Mapping[str, Any], above: Mapping[str, Any], key: str) -> bool:
    return isinstance(below.get(key), Mapping) and isinstance(above[key], Mapping)


def _line(name: str, section: Section) -> tuple[str, ...]:
    samples = section["dataset"]["samples"]
    return (
        name,
        section["title"] or "",
        section["kind"],
        "" if samples is None else f"{samples:,}",
        ", ".join(section["needs"]),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides: list[Callable[[str, int], str]] = [
        partial(str.rjust) if title == "samples" else partial(str.ljust) for title in head
    ]
    return "".join(
        "  ".join(
            side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )
