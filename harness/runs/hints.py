"""Commands to type next: one that completes, compares or draws finished runs, and the shortest for some cells."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.harness.config.checkpoint_names import as_typed
from espalier.harness.config.kept_tokens import KEEP, RATIO
from espalier.harness.paths import ROOT, short_path
from espalier.harness.specs.commands import RUN
from espalier.harness.store.sweep_files import SweepCell

#: Baselines of methods that remove tokens, and of methods that evict cache entries, each with a description.
CONTROLS = {"none": "the unpruned model", "random": "random dropping of tokens"}
CACHE_CONTROLS = {"none": "the unpruned model", "random_kv": "random eviction of entries"}

#: Hyper-parameter of the control: the decoder layer before which it drops.
LAYER = "method.params.layer"

#: Flags of a sweep.
MULTIRUN = ("-m", "--multirun")

Line = tuple[str, ...]


def next_step(
    argv: Sequence[str], rows: Sequence[Mapping[str, Any]], missing: int = 0
) -> tuple[str, str] | None:
    """Return a command and its purpose; None if there is nothing to suggest.

    Args:
        argv: the command line of the run, as checked.
        rows: its rows.
        missing: number of its cells that have no row although they can run.
    """
    options = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in argv}
    if missing:
        return command(argv), "runs the cells that have no row yet, and only these"
    draws = any(options.get(key, "null") != "null" for key in ("curves", "report"))
    if draws or "experiment" in options:
        return None
    methods = list(dict.fromkeys(row["method"] for row in rows))
    if any("+" in row["method"] or row["extra"].get("speculative") for row in rows):
        return None
    if methods == ["none"]:
        line = _with(argv, method="none,random,divprune", ratio="0.5,0.9")
        return (
            line,
            "shows the accuracy that remains without half or nine tenths of the visual tokens",
        )
    controls = CACHE_CONTROLS if any(row["extra"].get("cache") for row in rows) else CONTROLS
    absent = {name: purpose_of for name, purpose_of in controls.items() if name not in methods}
    layers = uncontrolled_layers(rows)
    if layers and controls is CONTROLS:
        names = ",".join(dict.fromkeys([*CONTROLS, *methods]))
        line = _with(argv, method=names, **{LAYER: ",".join(map(str, (0, *layers)))})
        words = [*absent.values(), f"random dropping at layer {' and '.join(map(str, layers))}"]
        return line, f"compares with {', '.join(words)}"
    if not absent:
        purpose = "draws accuracy against tokens kept, from the stored rows"
        return _with(argv, curves="results/curves"), purpose
    requested = options.get("method") or "divprune"
    names = ",".join([*absent, *([] if requested in absent else [requested])])
    return _with(argv, method=names), f"compares with {' and '.join(absent.values())}"


def uncontrolled_layers(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the decoder layers before which methods act first, where no row drops at random.

    Of methods that have no hyper-parameter `layer`: it would move them, too.
    """
    layers: dict[bool, set[int]] = {True: set(), False: set()}
    for row in rows:
        extra = row["extra"]
        site: Mapping[str, Any] = next(iter(extra.get("sites") or ()), {})
        is_control = row["method"] == "random"
        if site.get("where") == "layer" and (is_control or "layer" not in extra["params"]):
            layers[is_control].add(site["layer"])
    return sorted(layers[False] - layers[True])


def rerun(argv: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a command that runs only some cells of another command.

    If the cells are not all combinations of some values, this is the other command itself, which computes no row again.

    Args:
        argv: the other command line.
        lines: the overrides of each cell, `key=value`.
    """
    groups = products(lines)
    if len(groups) != 1:
        return command(argv)
    flags = [text for text in argv if text.startswith("-") and text not in MULTIRUN]
    return command([*flags, *groups[0]])


def command(argv: Sequence[str]) -> str:
    """Return the command line of a run that can be typed in this shell."""
    script = Path(sys.argv[0])
    if script.name == "espalier" or RUN.startswith("espalier"):
        start = ["espalier", "run"]
    elif script.parts[-2:] == ("espalier", "__main__.py"):
        start = [interpreter(), "-m", "espalier", "run"]
    else:
        start = [interpreter(), short_path(ROOT / "run.py")]
    return typed_line([*start, *map(as_typed, argv)])


def typed_line(words: Sequence[str]) -> str:
    """Return words as a person types them in a shell: in double quotes where they hold single ones."""
    return " ".join(
        f'"{word}"' if "'" in word and not set('"$`\\!') & set(word) else shlex.quote(word)
        for word in words
    )


def interpreter() -> str:
    """Return the command of this Python in this shell: `python` if that is it, else a path."""
    executable = Path(sys.executable)
    return "python" if shutil.which("python") == str(executable) else short_path(executable)


def _with(argv: Sequence[str], **changes: str) -> str:
    """Return the command line with keys set to other values, as a sweep if a value is a list."""
    replaced = {*changes, *(KEEP for key in changes if key == RATIO)}
    kept = [text for text in argv if text.partition("=")[0] not in replaced]
    values = [f"{key}={value}" for key, value in changes.items()]
    is_sweep = any("," in text for text in values) and not set(MULTIRUN) & set(argv)
    return command([*(["-m"] if is_sweep else []), *kept, *values])


def commands(cells: Sequence[SweepCell]) -> list[str]:
    """Return command lines that together have exactly these cells."""
    lines = products([cell.line for cell in cells if cell.line])
    return [typed_line([*RUN.split(), *map(as_typed, line)]) for line in lines]


def products(lines: Sequence[Sequence[str]]) -> list[Line]:
    """Return arguments of commands that together have exactly these cells: products wherever cells form one.

    Args:
        lines: the overrides of each cell, `key=value`.
    """
    remaining = list(dict.fromkeys(map(tuple, lines)))
    joined_lines: set[Line] = set()
    for key in dict.fromkeys(text.partition("=")[0] for line in remaining for text in line):
        # Lines that differ only in the value of the key become one.
        groups: dict[tuple[int, Line], list[Line]] = {}
        for line in remaining:
            other_texts = tuple(text for text in line if not text.startswith(f"{key}="))
            # The length separates lines without the key from those that have it.
            groups.setdefault((len(line), other_texts), []).append(line)
        remaining = []
        for group in groups.values():
            if len(group) > 1:
                texts = (text for line in group for text in line if text.startswith(f"{key}="))
                values = f"{key}={','.join(text.partition('=')[2] for text in texts)}"
                joined = (values if text.startswith(f"{key}=") else text for text in group[0])
                group = [tuple(joined)]
                joined_lines.update(group)
            remaining += group
    return [("-m", *line) if line in joined_lines else line for line in remaining]
