"""From lmms-eval's results to metrics: scales, filters, and what is no mean over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from espalier.harness.evaluation.metric_scores import collect


def task_of(name: str, **aggregations: Callable[[list[Any]], float]) -> Any:
    """A task of which only its name and its aggregations are read."""
    return SimpleNamespace(config=SimpleNamespace(task=name), aggregation=lambda: aggregations)


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def percent(values: Sequence[float]) -> float:
    return 100 * mean(values)


def results_of(task: str, values: dict[str, float], **columns: Sequence[Any]) -> dict[str, Any]:
    """What lmms-eval returns: aggregated values, and a line for each document."""
    lines = zip(*columns.values(), strict=True)
    samples = [
        {"doc_id": number, **dict(zip(columns, line, strict=True))}
        for number, line in enumerate(lines)
    ]
    return {"results": {task: values}, "samples": {task: samples}}


RIGHT = [1.0, 0.0, 1.0, 1.0]
STDERR = 0.25  # of a mean of 0.75 over four: sqrt(0.25 / 4)


#: Lines of a second filter, which lmms-eval logs after those of the plain one.
STRICT = [{"doc_id": number, "acc": float(number == 0)} for number in range(4)]


@pytest.mark.parametrize(
    ("values", "column", "scale", "logged"),
    [
        ({"acc,none": 75.0}, RIGHT, 100, []),
        ({"acc,none": 0.75}, RIGHT, 1, []),
        ({"acc,none": 0.75, "acc,strict": 0.25}, RIGHT, 1, STRICT),
        # Answers of AI2D all go through filters of its own: the first is the metric.
        ({"acc,letter": 0.75, "acc,strict": 0.25}, RIGHT, 1, []),
        ({"acc,none": 0.75}, [{"score": right, "id": 0} for right in RIGHT], 1, []),
    ],
)
def test_a_share_or_a_percentage_of_the_first_filter_has_scores_of_samples_and_an_error(
    values: dict[str, float], column: Sequence[Any], scale: int, logged: list[Any]
) -> None:
    results = results_of("t", values, acc=column)
    results["samples"]["t"] += logged
    aggregate = {1: mean, 100: percent}[scale]
    metrics, scores = collect(results, [task_of("t", acc=aggregate)], ["acc"], resample=True)
    assert metrics.pop("acc") == {"value": 0.75 * scale, "stderr": pytest.approx(STDERR * scale)}
    strict = {"acc,strict": {"value": 0.25, "stderr": None}}
    assert metrics == (strict if "acc,strict" in values else {})
    assert scores == {("t", n): {"acc": right * scale} for n, right in enumerate(RIGHT)}


def test_another_scale_is_no_mean_and_gives_no_scores_of_samples() -> None:
    """A thousandfold mean is an aggregate like any other: its error is the bootstrap's, or unknown."""
    task = task_of("t", acc=lambda values: 1000 * mean(values))
    results = results_of("t", {"acc,none": 750.0}, acc=RIGHT)
    metrics, scores = collect(results, [task], ["acc"], resample=True)
    assert scores == {}
    # The bootstrap's deviation is that of the sample without Bessel's correction.
    expected = 1000 * np.std(RIGHT) / 2
    assert metrics["acc"] == {"value": 750.0, "stderr": pytest.approx(expected, rel=0.1)}
    foreign, _ = collect(results, [task], ["acc"], resample=False)
    assert foreign["acc"] == {"value": 750.0, "stderr": None}


def test_tasks_of_a_group_keep_apart_and_come_in_the_given_order() -> None:
    tasks = [task_of("a", acc=mean), task_of("b", acc=percent)]
    first = results_of("a", {"acc,none": 0.5}, acc=[1.0, 0.0])
    second = results_of("b", {"acc,none": 100.0}, acc=[1.0, 1.0])
    both = {name: first[name] | second[name] for name in first}
    metrics, scores = collect(both, tasks, ["b/acc", "a/acc"], resample=True)
    assert [(name, metric["value"]) for name, metric in metrics.items()] == [
        ("b/acc", 100.0),
        ("a/acc", 0.5),
    ]
    assert (scores["a", 0], scores["b", 1]) == ({"a/acc": 1.0}, {"b/acc": 100.0})


def test_nan_is_no_value() -> None:
    results = results_of("t", {"acc,none": float("nan")}, acc=[float("nan"), 1.0])
    metrics, scores = collect(results, [task_of("t", acc=mean)], ["acc"], resample=False)
    assert (metrics, scores) == ({"acc": {"value": None, "stderr": None}}, {})
