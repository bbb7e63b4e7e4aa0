"""Every benchmark on a few rows of our own: through `run.py` on the embedded model, and with answers that are known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import run
from espalier.harness.config.group_lists import read_choice
from espalier.harness.store import Store
from tests.benchmarks.fixtures import ANSWERS, ARGUMENTS, FIXTURES, NOTHING, WORTH, WRONG
from tests.benchmarks.runs import BENCHMARKS, RUN, Repositories, arguments, metrics_of, spec_of


def test_every_benchmark_has_a_fixture() -> None:
    """But for those whose data are files of our own."""
    published = [
        name for name in BENCHMARKS if read_choice("benchmark", name)["dataset"]["path"] is not None
    ]
    assert [name for name in published if name not in FIXTURES] == []


def test_every_fixture_has_its_answers_and_a_benchmark() -> None:
    assert set(FIXTURES) == set(ANSWERS) == set(WORTH)
    assert set(FIXTURES) <= set(BENCHMARKS)
    assert {*WRONG, *ARGUMENTS} <= set(FIXTURES)


@pytest.mark.sampled(240)
@pytest.mark.parametrize("name", RUN)
def test_a_benchmark_runs_from_its_files_and_makes_a_row(
    name: str,
    repositories: Repositories,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    root = repositories(name)
    before = sorted(root.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert run.main(arguments(name, root, tmp_path / "store")) == 0, capfd.readouterr().err
    (row,) = Store(tmp_path / "store").rows()
    values = {name: metric["value"] for name, metric in row["metrics"].items()}
    assert values
    assert all(value is not None and math.isfinite(value) for value in values.values()), values
    assert row["n_samples"] > 0
    # Nothing is left beside the data, nor where the command was given.
    assert sorted(root.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.slow
@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", RUN)
def test_a_headline_is_worth_what_the_answers_are(
    name: str, repositories: Repositories, tmp_path: Path
) -> None:
    root = repositories(name)
    answers = (ANSWERS[name], lambda doc: "", WRONG.get(name, lambda doc: NOTHING))
    spec = spec_of(name, root, tmp_path)
    scores = [
        metrics_of(replace(spec, store=tmp_path / str(number)), answer)[spec.benchmark.headline]
        for number, answer in enumerate(answers)
    ]
    assert scores == pytest.approx(WORTH[name], abs=1e-4)
