"""Overhead of the harness: `python -m lab.bench.harness_overhead`, on an otherwise idle machine.

Times composing and checking a sweep before its first cell starts, per cell and in total; the help
and an input error, as complete processes; and composing, checking and storing a cell of 100 samples of the embedded
model relative to the cell's total time, alone and in a sweep, which is composed at once.
`--write FOLDER` writes overhead.md and .json there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.paths import ROOT
from espalier.harness.reports.printed_text import markdown_table
from espalier.harness.runs.runner import Runner
from espalier.harness.runs.single_run import CellRunner
from lab.bench.bench_page import DEVICE, LOAD, THREADS, Bench, measured_on, printed_page

RATIOS = ",".join(f"{number / 100:g}" for number in range(5, 75, 7))
#: A thousand cells: 20 methods and variants, 10 ratios, five image benchmarks.
SWEEP = (
    "-m",
    "method=none,random,random_layer2,uniform,uniform_layer2,pooled,fastv,fastv_paper,divprune,divprune_layer2,"
    "visionzip_paper,visionzip_official,cdpruner,cdpruner_unconditional,dart,d2pruner,d2pruner_di,sparsevlm_paper,h2o_paper,"
    "snapkv_paper",
    f"ratio={RATIOS}",
    "benchmark=seedling_rec,seedling_caption,seedling_ocr,seedling_vqa,seedling_exist",
    "refused=skip",
)
CELL = ("method=fastv", "ratio=0.75", "benchmark=seedling_rec", "engine.paired=0")
HERE = ("model=seedling", "model.device=cpu")
#: Complete processes: arguments and exit code.
ASKED = (("--help", 0), ("method=nosuch", 2))


@dataclass
class Timed(CellRunner):
    """Records the time to build and store rows."""

    storing: float = 0.0

    def _store(self, *arguments: Any) -> dict[str, Any]:
        row: dict[str, Any]
        row, seconds = timed(lambda: super(Timed, self)._store(*arguments))
        self.storing += seconds
        return row


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return a function's result and its time in seconds."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def starting(store: Path) -> list[tuple[str, str]]:
    """Return the times before the first of a thousand cells starts."""
    command, composing = timed(lambda: read_command([*SWEEP, *HERE, f"store={store}"]))
    specs, building = timed(lambda: [build_spec(cell) for cell in command.cells])
    runner = Runner(sweep=True)
    _, checking = timed(lambda: runner.admit(specs))
    cells, total = len(specs), composing + building + checking
    return [
        (f"composing {cells} cells", f"{composing:.2f} s, {1e3 * composing / cells:.2f} ms a cell"),
        ("values checked", f"{building:.2f} s, {1e3 * building / cells:.2f} ms a cell"),
        ("admitted, with their keys", f"{checking:.2f} s, {1e3 * checking / cells:.2f} ms a cell"),
        ("until the first may start", f"{total:.2f} s, and the imports of Python's packages"),
    ]


def processes() -> list[tuple[str, str]]:
    """Return the times of commands that run no cell, as the fastest of three."""
    times = []
    for argument, code in ASKED:
        command = [sys.executable, str(ROOT / "run.py"), argument]
        call = partial(subprocess.run, command, capture_output=True, check=False)
        runs = [timed(call) for _ in range(3)]
        assert {done.returncode for done, _ in runs} == {code}
        times.append((f"run.py {argument}", f"{min(seconds for _, seconds in runs):.2f} s"))
    return times


def cell_overheads(store: Path) -> list[tuple[str, str]]:
    """Return the overhead of cells of 100 samples; models and packages are loaded before."""
    warm, _ = prepared(store, [*CELL, "limit=1"])
    warm.run(warm.admitted[0])
    ratios = [f"{number / 100:g}" for number in range(50, 80)]
    return [
        ("a cell of 100 samples alone", share_of(store, [*CELL, "limit=100"])),
        (
            f"one of {len(ratios)} cells of a sweep",
            share_of(store, ["-m", *CELL, f"ratio={','.join(ratios)}", "limit=100"]),
        ),
    ]


def share_of(store: Path, overrides: Sequence[str]) -> str:
    """Return the overhead per cell and its share of the cell's time, as text."""
    with tempfile.TemporaryDirectory(dir=store) as folder:
        runner, costs_by_step = prepared(Path(folder), overrides)
        runner.cells = cells = Timed(board=runner.board)
        running = sum(timed(partial(runner.run, cell))[1] for cell in runner.admitted)
    costs_by_step["store"] = cells.storing
    costs, count = sum(costs_by_step.values()), len(runner.admitted)
    total = costs + running - cells.storing
    parts = ", ".join(f"{name} {seconds / count:.3f}" for name, seconds in costs_by_step.items())
    return (
        f"{costs / count:.3f} s of {total / count:.2f} s are the harness's, "
        f"{costs / total:.1%} ({parts})"
    )


def prepared(store: Path, overrides: Sequence[str]) -> tuple[Runner, dict[str, float]]:
    """Return a runner with admitted cells, and the time in seconds."""
    command, composing = timed(lambda: read_command([*overrides, *HERE, f"store={store}"]))
    specs, building = timed(lambda: [build_spec(cell) for cell in command.cells])
    runner = Runner(sweep=len(specs) > 1)
    _, checking = timed(lambda: runner.admit(specs))
    return runner, {"compose": composing, "check and key": building + checking}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times, each in words."""
    del options
    with tempfile.TemporaryDirectory() as folder:
        lines = [*processes(), *starting(Path(folder)), *cell_overheads(Path(folder))]
    return {"times": lines}


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    machine = measured_on(result["conditions"], DEVICE, THREADS, LOAD)
    return (
        "# What the harness costs beside answering\n\n"
        f"Written by `python -m lab.bench.harness_overhead` on {machine}.\n\n"
        f"{markdown_table(('what', 'how long'), result['times'], 'l')}"
    )


BENCH = Bench("harness_overhead", measure, printed_page(page), page, name="overhead")
main = BENCH.main


if __name__ == "__main__":
    sys.exit(main())
