"""The command that a person is told to run next."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.config.compose import read_command
from espalier.harness.paths import ROOT
from espalier.harness.runs import hints


def row(method: str, speculative: object = None) -> dict[str, Any]:
    return {"method": method, "extra": {"speculative": speculative}}


CASES = [
    # command line; methods of its rows; what the next one holds
    ("method=fastv ratio=0.9", ["fastv"], "-m ratio=0.9 method=none,random,fastv"),
    ("", ["divprune"], "-m method=none,random,divprune"),
    ("method=none limit=8", ["none"], "-m limit=8 method=none,random,divprune ratio=0.5,0.9"),
    ("method=random", ["random"], "-m method=none,random"),
    (
        "-m method=none,fastv ratio=0.5,0.9",
        ["none", "fastv"],
        "-m ratio=0.5,0.9 method=random,none,fastv",
    ),
    (
        "-m method=none,random,fastv ratio=0.5",
        ["none", "random", "fastv"],
        "-m method=none,random,fastv ratio=0.5 curves=results/curves",
    ),
]


@pytest.mark.parametrize(("line", "methods", "expected"), CASES)
def test_what_is_missing_is_asked_for_and_composes(
    line: str, methods: list[str], expected: str
) -> None:
    found = hints.next_step(line.split(), [row(method) for method in methods])
    assert found is not None
    python, script, *arguments = shlex.split(found[0])
    assert (python.endswith("python") or "python3" in python, script) == (True, "run.py")
    assert " ".join(arguments) == expected
    assert read_command(arguments, typed=True).cells


def test_cells_without_a_row_come_first() -> None:
    argv = ["-m", "method=none,fastv"]
    found = hints.next_step(argv, [row("none")], missing=1)
    assert found is not None
    assert found[0].endswith("run.py -m method=none,fastv")


@pytest.mark.parametrize(
    "done", ["curves=results/a", "report=lab/measured/sweep", "+experiment=quickstart"]
)
def test_nothing_is_added_to_what_is_drawn_already(done: str) -> None:
    assert hints.next_step(["-m", "method=none,fastv", done], [row("none"), row("fastv")]) is None


def test_a_decoder_is_compared_with_another() -> None:
    found = hints.next_step(["method=pearl"], [row("pearl", {"gamma": 3})])
    assert found is not None
    assert found[0].endswith("run.py -m method=vanilla_sd,pearl")


def test_what_the_shell_would_read_otherwise_is_quoted() -> None:
    argv = ["method.draft_options={dtype: float32}"]
    assert shlex.split(hints.command(argv))[2:] == argv


def test_python_is_named_as_this_shell_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)
    assert hints.interpreter() == ".venv/bin/python"
    monkeypatch.setenv("PATH", str(python.parent))
    assert hints.interpreter() == "python"


def test_the_console_script_suggests_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hints.command(["limit=2"]).endswith(" run.py limit=2")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/espalier", "run"])
    assert hints.command(["limit=2"]) == "espalier run limit=2"
    monkeypatch.setattr(sys, "argv", ["/checkout/espalier/__main__.py", "run"])
    assert hints.command(["limit=2"]).endswith(" -m espalier run limit=2")


def test_run_py_is_named_from_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hints.command(["limit=2"]).endswith(f" {ROOT / 'run.py'} limit=2")


def test_what_failed_is_run_again_and_nothing_else() -> None:
    command = read_command(["-m", "method=none,fastv,dart", "ratio=0.5,0.9", "limit=2"])
    cells = {(line[0], line[1]): line for line in command.lines}
    one = cells["method=dart", "ratio=0.9"]
    assert said(hints.rerun(command.argv, [one])) == "method=dart ratio=0.9 limit=2"
    product = [cells[f"method={name}", "ratio=0.5"] for name in ("none", "dart")]
    assert said(hints.rerun(command.argv, product)) == "-m method=none,dart ratio=0.5 limit=2"
    # None of these two stands in a product without a third cell that has its row.
    apart = [cells["method=none", "ratio=0.5"], cells["method=dart", "ratio=0.9"]]
    assert said(hints.rerun(command.argv, apart)) == " ".join(command.argv)


def said(line: str) -> str:
    return line.partition("run.py ")[2]
