"""Shared code of the benchmark commands: options, exit codes, pages and figures."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from espalier.harness.errors import UserError
from espalier.harness.store.files import durable

#: Hugging Face libraries read these when they are imported; no benchmark needs the network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

#: Descriptions of a machine for `measured_on`.
DEVICE, CORES, THREADS = "{device}", "{cores} cores", "{threads} threads"
LOAD = "load {load_average:.1f}"

Given = ParamSpec("Given")


def bench_command(main: Callable[Given, int]) -> Callable[Given, int]:
    """Make a module's main function run offline, and report UserError in one line with exit code 2.

    The function's own exit code is 0, also if targets are missed.
    """

    @wraps(main)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> int:
        os.environ.update(OFFLINE)
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run


def parser(module: str, page: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for `python -m lab.bench.<module>`; with a page it has the option `--write`."""
    arguments = argparse.ArgumentParser(prog=f"python -m lab.bench.{module}")
    if page is not None:
        arguments.add_argument("--write", type=Path, help=f"folder for {page}.json and .md")
    return arguments


def leave(folder: Path | None, name: str, page: str, result: Mapping[str, Any]) -> None:
    """Write `<name>.md` and `<name>.json` into a folder, each atomically; None: nothing.

    Raises:
        ValueError: a figure is NaN or infinite.
        StoreLost: the disk is full or cannot be written.
    """
    if folder is None:
        return
    figures = json.dumps(result, indent=1, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    durable.replace(folder / f"{name}.md", f"{page.removesuffix(chr(10))}\n".encode())
    durable.replace(folder / f"{name}.json", f"{figures}\n".encode())


def say(result: Mapping[str, Any]) -> None:
    """Print every figure as one JSON object, the last line of stdout."""
    print(json.dumps(result, allow_nan=False), flush=True)


def finish(folder: Path | None, name: str, page: str, result: Mapping[str, Any]) -> None:
    """End a benchmark: write its page and figures, and print the figures; raises like `leave`."""
    leave(folder, name, page, result)
    say(result)


def measured_on(machine: Mapping[str, Any], *templates: str) -> str:
    """Return a page's description of the machine: its name, relevant conditions, and versions.

    Args:
        machine: `lab.bench.speed_bench.conditions`.
        templates: texts with names of it, such as `CORES`.
    """
    conditions = ", ".join(templates).format(**machine)
    return f"{machine['device_name']} ({conditions}), torch {machine['torch']}, transformers {machine['transformers']}"


def verdict(met: bool | None) -> str:
    """Return a table's verdict on a target; empty without one."""
    return {True: "met", False: "missed", None: ""}[met]


def goal(target: str, met: bool, value: str) -> str:
    """Return the line of a page for one target."""
    return f"- {verdict(met)}: {target} ({value})"
