"""The commands of docs/first_gpu_run.md, taken from its text: each composes, each benchmark and module is there."""

from __future__ import annotations

import csv
import re
import shlex
from importlib.util import find_spec

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.group_lists import choices
from espalier.harness.paths import ROOT
from espalier.harness.reports.tables.anchors import read_anchors
from lab.pages.anchors_page import page
from tests.pages.test_readme import commands

PAGE = (ROOT / "docs/first_gpu_run.md").read_text()

#: Mean number of visual tokens that enter a layer of LLaVA-1.5, by the ratio that the page gives for it.
BUDGETS = ["192", "128", "64"]


RUNS = [line for line in commands(PAGE) if line.startswith("python run.py")]
CHECKS = [
    line
    for line in commands(PAGE)
    if line.startswith("python -m espalier benchmarks") and not line.endswith("list")
]


@pytest.mark.sampled(18)
@pytest.mark.parametrize("line", [*RUNS, *re.findall(r"`(python run\.py [^`]*)`", PAGE)])
def test_command_lines_of_run_compose(line: str) -> None:
    arguments = shlex.split(line)[2:]
    command = read_command(arguments, typed=True)
    assert bool(command.cells) != ("--cfg" in arguments)
    for cell in command.cells:
        build_spec(cell)


@pytest.mark.parametrize("line", CHECKS)
def test_benchmarks_that_are_fetched_and_checked_are_there(line: str) -> None:
    _, _, _, _, verb, name, *overrides = shlex.split(line)
    assert verb in ("prefetch", "check")
    assert name in choices("benchmark")
    assert read_command([f"benchmark={name}", *overrides], typed=True).cells


def test_modules_and_targets_are_there() -> None:
    for line in commands(PAGE):
        words = shlex.split(line)
        if line.startswith("python -m"):
            assert find_spec(words[2]) is not None
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        else:
            assert line.startswith(("python run.py", ". .venv/bin/activate", "export HF_HOME="))


@pytest.mark.slow
def test_what_is_run_was_fetched() -> None:
    fetched = {shlex.split(line)[5] for line in CHECKS if " prefetch " in line}
    run = {
        build_spec(cell).benchmark.name
        for line in RUNS
        for cell in read_command(shlex.split(line)[2:]).cells  # type: ignore[union-attr]
    }
    assert run == fetched


def test_expected_numbers_are_those_of_the_anchors() -> None:
    assert page() == PAGE, "python -m lab.pages.anchors_page --write docs/first_gpu_run.md"
    anchors = read_anchors()
    assert len({anchor.model for anchor in anchors}) >= 10
    assert len({anchor.model.partition("_")[0] for anchor in anchors}) >= 6


def test_rows_of_fastv_are_those_of_the_paper() -> None:
    with (ROOT / "results/papers/d2pruner_table1.csv").open() as file:
        cells = [row for row in csv.DictReader(file) if row["method"] == "FastV"]
    printed = [
        (cell["budget"].split()[0], cell["benchmark"], cell["value"])
        for cell in cells
        if cell["model"] == "LLaVA-1.5-7B" and cell["benchmark"] in ("POPE", "TextVQA")
    ]
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, flags=re.MULTILINE)
    on_page = [
        (n, name, value)
        for n, *values in rows
        for name, value in zip(("POPE", "TextVQA"), values, strict=True)
    ]
    assert sorted(on_page) == sorted(printed)


def test_the_sweep_keeps_the_tokens_of_the_printed_rows() -> None:
    (sweep,) = [line for line in RUNS if "curves=" in line]
    assert f" keep={','.join(BUDGETS)} " in sweep
    assert re.findall(r"^\| (\d+) \| [\d.]+ \| [\d.]+ \|$", PAGE, flags=re.MULTILINE) == BUDGETS
