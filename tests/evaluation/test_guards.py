"""No failure of scoring becomes a number: samples and metrics that cannot be scored are named."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.errors import UserError
from espalier.harness.evaluation.evaluate import SampleErrors, evaluate_session
from espalier.harness.evaluation.metric_scores import Unscored
from espalier.harness.store import Journal
from tests.arithmetic import UTILS, YAML, Calculator, make_spec, sums, write_task


def task_with(folder: Path, utils: str, yaml: str = YAML, n: int = 5) -> Path:
    write_task(folder, sums(n))
    (folder / "utils.py").write_text(utils)
    (folder / "sums.yaml").write_text(yaml)
    return folder


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ZeroDivisionError('no\\n pairs')", "ZeroDivisionError: no pairs"),
        ("return float('nan')", "its aggregation gives nan"),
        ("return None", "its aggregation gives None"),
    ],
)
def test_an_aggregation_without_a_number_is_named(
    body: str, reason: str, tmp_path: Path, journal: Journal
) -> None:
    folder = task_with(tmp_path / "t", UTILS.replace("hits = sum(", f"{body}\n    hits = sum("))
    spec = make_spec(folder, metrics=("right", "f1"))
    with pytest.raises(UserError, match="benchmark=sums: f1 of task sums cannot be computed") as e:
        evaluate_session(spec, Calculator(), journal)
    assert reason in str(e.value)
    # Nothing is lost, and nothing is scored.
    assert [set(entry) & {"answer", "scores"} for entry in journal.entries()] == [{"answer"}] * 5
    # Nobody asked for the metric: it is not computed at all.
    result = evaluate_session(make_spec(folder), Calculator(), journal)
    assert (result.metrics["right"]["value"], result.resumed) == (1.0, 5)


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "{'score': float('nan')}"])
def test_a_sample_whose_metric_is_no_number_is_named(
    value: str, tmp_path: Path, journal: Journal
) -> None:
    wrong = f"if doc['target'] == '9': return {{'right': {value}, 'f1': ('', '')}}\n    return {{"
    folder = task_with(tmp_path / "t", UTILS.replace("return {", wrong, 1))
    spec = make_spec(folder)
    with pytest.raises(
        SampleErrors, match=r"1 of 5 .*sums/2: ValueError: metric right is (nan|inf)"
    ):
        evaluate_session(spec, Calculator(), journal)
    result = evaluate_session(make_spec(folder, max_errors=1), Calculator(), journal)
    assert (result.n_samples, result.metrics["right"]["value"]) == (4, 1.0)
    assert not any(math.isnan(v) for scores in result.scores.values() for v in scores.values())


def test_unparsed_answers_are_counted_beside_the_metrics(tmp_path: Path, journal: Journal) -> None:
    """The task tells which answers it could not read; the benchmark does not even report that metric."""
    utils = UTILS.replace(
        'return {"right"', 'return {"unparsed": float(len(results[0]) > 1), "right"'
    )
    yaml = YAML + "  - {metric: unparsed, aggregation: mean, higher_is_better: false}\n"
    folder = task_with(tmp_path / "t", utils, yaml)
    result = evaluate_session(make_spec(folder), Calculator(), journal)
    assert (list(result.metrics), result.unparsed) == (["right"], 2)
    plain = write_task(tmp_path / "plain", sums(5))
    other = Journal(tmp_path / "other.jsonl")
    assert evaluate_session(make_spec(plain), Calculator(), other).unparsed == 0


def test_the_error_survives_the_way_between_processes() -> None:
    error: Any = pickle.loads(pickle.dumps(Unscored.of("mme", "mme", "sum", "AssertionError: two")))
    assert isinstance(error, Unscored)
    assert "benchmark=mme: sum of task mme cannot be computed: AssertionError: two" in str(error)
