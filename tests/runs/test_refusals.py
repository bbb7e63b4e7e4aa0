"""Wrong input ends with code 2 and one line, before a model is loaded: the list of tests/refusals.yaml."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.harness.models import build_adapter
from espalier.harness.paths import ROOT
from tests.runs.helpers import make_bench

FILE = ROOT / "tests" / "refusals.yaml"


def split(command: str | list[str]) -> list[str]:
    return command.split() if isinstance(command, str) else command


#: What the file has: groups of command lines of one program.
GROUPS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
#: By what they concern: command lines, each with words of its line.
REFUSALS: dict[str, list[tuple[list[str], list[str]]]] = {
    group["about"]: [
        ([*group.get("before", "").split(), *split(command)], words)
        for command, *words in group["commands"]
    ]
    for group in GROUPS
}


def instances(of_run: bool) -> list[Any]:
    """The lines of run.py, or those of other programs."""
    return [
        pytest.param(group.get("program", "run"), *line, id=" ".join(line[0]))
        for group in GROUPS
        for line in REFUSALS[group["about"]]
        if ("program" not in group) == of_run
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(("_program", "command", "words"), instances(of_run=True))
def test_a_command_is_refused_with_one_line(
    _program: str,
    command: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench(tmp_path / "store", capsys, monkeypatch)
    done = bench(*command)
    assert (done.code, done.out) == (2, "")
    *notes, line = done.err.splitlines()
    assert all("is a former name of" in note for note in notes)
    assert line.startswith("error: ")
    assert [word for word in words if word not in line] == []
    assert "sk-0123456789" not in done.err
    assert (bench.fake.loads, bench.fake.specs) == (0, [])


@pytest.mark.sampled
@pytest.mark.parametrize(("program", "command", "words"), instances(of_run=False))
def test_other_programs_refuse_with_one_line(
    program: str,
    command: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_adapter, "load_adapter", lambda spec: pytest.fail("loaded"))
    assert import_module(program).main(command) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert [word for word in words if word not in err] == []
