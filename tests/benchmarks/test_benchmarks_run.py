"""Every benchmark on a few rows of our own: through `run.py` on the embedded model, and with answers that are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import run
from harness.config.build import build_spec
from harness.config.compose import CONF, read_command
from harness.evaluation.evaluate import Evaluation, evaluate_session, open_benchmark
from harness.specs import RunSpec
from harness.store import Store
from tests.benchmarks.answering import Told
from tests.benchmarks.fixtures import ANSWERS, ARGUMENTS, FIXTURES, NOTHING, WORTH, WRONG, Answer

Repositories = Callable[[str], Path]

#: Benchmarks of conf/benchmark whose samples are drawn by the harness, not read from a data set.
DRAWN = "seedling_"

BENCHMARKS = sorted(
    path.stem for path in (CONF / "benchmark").glob("*.yaml") if not path.stem.startswith(DRAWN)
)
#: Those that are run here; the tests below name what is missing.
RUN = sorted(set(BENCHMARKS) & set(FIXTURES))


def arguments(name: str, root: Path, store: Path) -> list[str]:
    """Return the command line of a benchmark on its fixture: all rows, few tokens."""
    return [
        *(f"benchmark={name}", f"benchmark.path={root}", f"store={store}", "limit=null"),
        *("engine.batch_size=2", "engine.warmup=0", "engine.paired=0", "model.device=cpu"),
        *("+benchmark.generation.max_new_tokens=4", "json=true"),
        *ARGUMENTS.get(name, lambda root: ())(root),
    ]


def spec_of(name: str, root: Path, store: Path) -> RunSpec:
    command = read_command(arguments(name, root, store))
    assert command is not None
    return build_spec(command.cells[0])


def told(spec: RunSpec, answer: Answer) -> Evaluation:
    """Evaluate the answers that a function of the documents gives."""
    loaded = open_benchmark(spec)
    journal = Store(spec.store).run("0" * 16).journal
    return evaluate_session(spec, Told(loaded.tasks, answer), journal, loaded=loaded)


def worth(spec: RunSpec, answer: Answer) -> float:
    """Return the headline of these answers."""
    value = told(spec, answer).metrics[spec.benchmark.headline]["value"]
    assert value is not None
    return value


def test_every_benchmark_has_a_fixture() -> None:
    assert [name for name in BENCHMARKS if name not in FIXTURES] == []


def test_every_fixture_has_its_answers_and_a_benchmark() -> None:
    assert set(FIXTURES) == set(ANSWERS) == set(WORTH)
    assert set(FIXTURES) <= set(BENCHMARKS)
    assert {*WRONG, *ARGUMENTS} <= set(FIXTURES)


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
    values = {metric: found["value"] for metric, found in row["metrics"].items()}
    assert values
    assert all(value is not None and math.isfinite(value) for value in values.values()), values
    assert row["n_samples"] > 0
    # Nothing is left beside the data, nor where the command was given.
    assert sorted(root.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", RUN)
def test_a_headline_is_worth_what_the_answers_are(
    name: str, repositories: Repositories, tmp_path: Path
) -> None:
    root = repositories(name)
    answers = (ANSWERS[name], lambda doc: "", WRONG.get(name, lambda doc: NOTHING))
    spec = spec_of(name, root, tmp_path)
    found = [
        worth(replace(spec, store=tmp_path / str(number)), answer)
        for number, answer in enumerate(answers)
    ]
    assert found == pytest.approx(WORTH[name], abs=1e-4)
