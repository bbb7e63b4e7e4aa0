"""Wrong input ends with code 2 and one line, before a model is loaded: the list of tests/refusals.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from espalier.harness.paths import ROOT
from tests.runs.helpers import make_bench

FILE = ROOT / "tests" / "refusals.yaml"


def split(command: str | list[str]) -> list[str]:
    return command.split() if isinstance(command, str) else command


#: By what they concern: command lines, each with words of its line.
REFUSALS: dict[str, list[tuple[list[str], list[str]]]] = {
    group["about"]: [
        ([*group.get("before", "").split(), *split(command)], words)
        for command, *words in group["commands"]
    ]
    for group in yaml.safe_load(FILE.read_text(encoding="utf-8"))
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("command", "words"),
    [pytest.param(*line, id=" ".join(line[0])) for lines in REFUSALS.values() for line in lines],
)
def test_a_command_is_refused_with_one_line(
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
