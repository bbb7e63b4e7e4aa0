"""The frame of the benchmark commands: options, a measurement, exit codes, a page and its figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import torch

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.runs.environment import device_name, installed_version
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


#: Figures of a benchmark by name, as its JSON file has them.
Result = Mapping[str, Any]


def printed_page(page: Callable[[Any], str]) -> Callable[[Any], None]:
    """Return a function that prints the page of a result."""
    return lambda result: print(page(result))


@dataclass(frozen=True)
class Bench:
    """A benchmark command: `python -m lab.bench.<module>`, exit code 0 also if targets are missed, 2 for bad input.

    It prints a table and, as the last line of stdout, every figure as one JSON object; `--write FOLDER` leaves both.

    Attributes:
        module: its file.
        measure: returns the figures for some options. What it prints goes to stderr. `conditions` are added, those of
            the processor, unless it has its own.
        show: prints the table of figures.
        page: returns the page of figures in Markdown; None: it has no page.
        options: arguments of `add_argument` by the option's name.
        name: of page and figures in the folder.
        parts_page: whether figures of chosen parts (`--only`) have a page of their own, `<name>_only`.
        one_thread: whether everything is computed on one thread.
        schema: version of the figures' format.
    """

    module: str
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    show: Callable[[Result], None]
    page: Callable[[Result], str] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = ""
    parts_page: bool = False
    one_thread: bool = False
    schema: int = 1

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Measure, print the figures, and write them if a folder is named."""
        return bench_command(self._run)(argv)

    def _run(self, argv: Sequence[str] | None) -> int:
        arguments = parser(self.module, self.name or None)
        for name, keywords in self.options.items():
            arguments.add_argument(name, **keywords)
        options = arguments.parse_args(argv)
        threads = one_thread() if self.one_thread else contextlib.nullcontext()
        with contextlib.redirect_stdout(sys.stderr), threads:
            result = {"schema": self.schema, **self.measure(options)}
            if "conditions" not in result:
                result["conditions"] = conditions("cpu")
        self.show(result)
        if self.page is not None:
            part = "_only" * bool(self.parts_page and options.only)
            leave(options.write, f"{self.name}{part}", self.page(result), result)
        say(result)
        return 0


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def conditions(device: str) -> dict[str, object]:
    """Return the conditions, besides the code, that figures on `device` depend on."""
    return {
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "device": device,
        "device_name": device_name(device),
    }


def choose(only: str | None, parts: Iterable[str]) -> tuple[str, ...]:
    """Return the parts named in a comma-separated list, from `parts` and in their order; None selects all.

    Raises:
        UserError: an unknown part.
    """
    valid = tuple(parts)
    if only is None:
        return valid
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in valid:
            raise unknown_name("--only", name, valid)
    return tuple(name for name in valid if name in names)


def measured_on(machine: Mapping[str, Any], *templates: str) -> str:
    """Return a page's description of the machine: its name, relevant conditions, and versions.

    Args:
        machine: `conditions`.
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
