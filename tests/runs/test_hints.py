"""The command that is suggested as the next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
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


def next_step(argv: Sequence[str], rows: list[dict[str, Any]], missing: int = 0) -> str:
    """Return the command that is suggested after these rows."""
    step = hints.next_step(argv, rows, missing)
    return step[0]


@pytest.mark.parametrize(
    ("line", "methods", "expected"),
    [
        ("", ["fastv"], "-m method=none,random,fastv method.params.layer=0,2"),
        (
            "-m method=none,random,fastv method.params.K=2",
            ["none", "random", "fastv"],
            "-m method.params.K=2 method=none,random,fastv method.params.layer=0,2",
        ),
    ],
)
def test_a_control_drops_where_a_method_does(line: str, methods: list[str], expected: str) -> None:
    rows = [row(method) for method in methods]
    rows[-1]["extra"] |= {"sites": [{"where": "layer", "layer": 2}], "params": {"K": 2}}
    arguments = shlex.split(next_step(line.split(), rows))[2:]
    assert " ".join(arguments) == expected
    assert len(read_command(arguments, typed=True).cells) == 4
    control = row("random")
    control["extra"] |= {"sites": [{"where": "layer", "layer": 2}], "params": {"layer": 2}}
    assert hints.uncontrolled_layers([*rows, control]) == []
    rows[-1]["extra"]["params"] = {"layer": 2}
    assert hints.uncontrolled_layers(rows) == []


@pytest.mark.parametrize(("line", "methods", "expected"), CASES)
def test_what_is_missing_is_asked_for_and_composes(
    line: str, methods: list[str], expected: str
) -> None:
    python, script, *arguments = shlex.split(
        next_step(line.split(), [row(method) for method in methods])
    )
    assert (python.endswith("python") or "python3" in python, script) == (True, "run.py")
    assert " ".join(arguments) == expected
    assert read_command(arguments, typed=True).cells


def test_cells_without_a_row_come_first() -> None:
    line = next_step(["-m", "method=none,fastv"], [row("none")], missing=1)
    assert line.endswith("run.py -m method=none,fastv")


@pytest.mark.parametrize(
    "done", ["curves=results/a", "report=lab/measured/sweep", "+experiment=quickstart"]
)
def test_nothing_is_added_to_what_is_drawn_already(done: str) -> None:
    assert hints.next_step(["-m", "method=none,fastv", done], [row("none"), row("fastv")]) is None


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("method.draft_options={dtype: float32}", "'method.draft_options={dtype: float32}'"),
        ("benchmark.question='is it ?'", "\"benchmark.question='is it ?'\""),
        ("benchmark.question='is it !'", None),
        ("""benchmark.question="what's it ?\"""", None),
        ("store=a b", "'store=a b'"),
    ],
)
def test_what_the_shell_would_read_otherwise_is_quoted(text: str, typed: str | None) -> None:
    line = hints.command([text])
    assert shlex.split(line)[2:] == [text]
    assert typed is None or line.endswith(f" {typed}")


def test_a_checkpoint_stands_as_it_is_typed() -> None:
    assert hints.command(["model=checkpoint:me%2Ftiny,checkpoint:%2Fa%20b"]).endswith(
        " model=me/tiny,checkpoint:%2Fa%20b"
    )


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


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (None, "run.py limit=2"),
        ("/usr/bin/espalier", "espalier run limit=2"),
        ("/checkout/espalier/__main__.py", " -m espalier run limit=2"),
    ],
)
def test_the_program_suggests_itself(
    program: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program is not None:
        monkeypatch.setattr(sys, "argv", [program, "run"])
    assert hints.command(["limit=2"]).endswith(line)


def test_run_py_is_named_from_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hints.command(["limit=2"]).endswith(f" {ROOT / 'run.py'} limit=2")


@pytest.mark.parametrize(
    ("failed", "line"),
    [
        ([("dart", "0.9")], "method=dart ratio=0.9 limit=2"),
        ([("none", "0.5"), ("dart", "0.5")], "-m method=none,dart ratio=0.5 limit=2"),
        # None of these two stands in a product without a third cell that has its row.
        ([("none", "0.5"), ("dart", "0.9")], "-m method=none,fastv,dart ratio=0.5,0.9 limit=2"),
    ],
)
def test_what_failed_is_run_again_and_nothing_else(
    failed: list[tuple[str, str]], line: str
) -> None:
    command = read_command(["-m", "method=none,fastv,dart", "ratio=0.5,0.9", "limit=2"])
    cells = {(cell[0], cell[1]): cell for cell in command.lines}
    lines = [cells[f"method={method}", f"ratio={ratio}"] for method, ratio in failed]
    assert hints.rerun(command.argv, lines).partition("run.py ")[2] == line
