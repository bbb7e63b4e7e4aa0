"""What a person may want next: the command that completes, compares or draws what was just run."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.harness.runs.status.rerun_commands import products

#: Rows that every other one is read by: nothing removed, and removed at random.
CONTROLS = ("none", "random")
#: The same of methods that evict cache entries.
OF_CACHES = ("none", "random_kv")


#: Flags that ask for a sweep.
MANY = ("-m", "--multirun")


def next_step(
    argv: Sequence[str], rows: Sequence[Mapping[str, Any]], missing: int = 0
) -> tuple[str, str] | None:
    """Return a command and what it is for; None if nothing is to be added.

    Args:
        argv: the command line of the run, as it was checked.
        rows: that it gave.
        missing: how many of its cells gave none although they can run.
    """
    given = {text.partition("=")[0].lstrip("+"): text.partition("=")[2] for text in argv}
    if missing:
        return command(argv), "runs the cells that have no row yet, and only these"
    if {"curves", "report"} & {
        key for key, value in given.items() if value != "null"
    } or "experiment" in given:
        return None
    methods = list(dict.fromkeys(row["method"] for row in rows))
    if any(row["extra"].get("speculative") for row in rows):
        return _decoders(argv, given)
    if methods == ["none"]:
        line = _with(argv, method="none,random,divprune", ratio="0.5,0.9")
        return line, "what is left of it when half or nine tenths of the visual tokens go"
    if any("+" in method for method in methods):
        return _stacks(argv, given)
    caches = any(row["extra"].get("cache") for row in rows)
    controls = OF_CACHES if caches else CONTROLS
    absent = [name for name in controls if name not in methods]
    if absent:
        asked = given.get("method") or "divprune"
        names = ",".join([*absent, *([] if asked in absent else [asked])])
        return _with(argv, method=names), f"beside {' and '.join(map(_said, absent))}"
    return _with(
        argv, curves="results/curves"
    ), "draws accuracy against tokens kept, from the stored rows"


def rerun(argv: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return the command that runs some cells of another one and no others.

    Where they are not all combinations of some values, that is the other command itself, which makes no row again.

    Args:
        argv: the other command line.
        lines: the overrides of each of the cells, `key=value`.
    """
    found = products(lines)
    if len(found) != 1:
        return command(argv)
    flags = [text for text in argv if text.startswith("-") and text not in MANY]
    return command([*flags, *found[0]])


def command(argv: Sequence[str]) -> str:
    """Return a command line of run.py as it can be typed here."""
    return shlex.join([interpreter(), "run.py", *argv])


def interpreter() -> str:
    """Return what starts this Python in this shell: `python` where that is it, else a path."""
    here = Path(sys.executable)
    if shutil.which("python") == str(here):
        return "python"
    return shorter(here)


def shorter(path: Path) -> str:
    """Return a path from the working directory if it lies in there, else in full."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _decoders(argv: Sequence[str], given: Mapping[str, str]) -> tuple[str, str] | None:
    if "," in given.get("method", ""):
        return None
    asked = given["method"]
    other = "vanilla_sd" if asked != "vanilla_sd" else "pearl"
    return _with(argv, method=f"{other},{asked}"), f"beside {other}, another way to draft"


def _stacks(argv: Sequence[str], given: Mapping[str, str]) -> tuple[str, str] | None:
    short, long = "compressor", "method@compressor"
    asked = given.get(long) or given.get(short)
    if asked is None or "," in asked:
        return None
    kept = [text for text in argv if text.partition("=")[0] not in (short, long)]
    return _with(kept, compressor=f"none,{asked}"), "beside the same method with the whole cache"


def _said(name: str) -> str:
    return {
        "none": "the unpruned model",
        "random": "tokens dropped at random",
        "random_kv": "entries evicted at random",
    }[name]


def _with(argv: Sequence[str], **changes: str) -> str:
    """Return the command line with keys set to other values, as a sweep where a value is a list."""
    kept = [text for text in argv if text.partition("=")[0] not in changes]
    values = [f"{key}={value}" for key, value in changes.items()]
    many = any("," in text for text in values) and not set(MANY) & set(argv)
    return command([*(["-m"] if many else []), *kept, *values])
