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
    config = SimpleNamespace(task=name)
    return SimpleNamespace(config=config, aggregation=lambda: aggregations)


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


def test_a_percentage_scales_its_samples_and_its_error() -> None:
    found = results_of("t", {"acc,none": 75.0}, acc=RIGHT)
    metrics, scores = collect(found, [task_of("t", acc=percent)], ["acc"], resample=True)
    assert metrics == {"acc": {"value": 75.0, "stderr": pytest.approx(100 * STDERR)}}
    assert scores == {("t", n): {"acc": 100 * one} for n, one in enumerate(RIGHT)}


def test_a_share_stays_a_share() -> None:
    found = results_of("t", {"acc,none": 0.75}, acc=RIGHT)
    metrics, scores = collect(found, [task_of("t", acc=mean)], ["acc"], resample=True)
    assert metrics == {"acc": {"value": 0.75, "stderr": pytest.approx(STDERR)}}
    assert scores == {("t", n): {"acc": one} for n, one in enumerate(RIGHT)}


def test_another_scale_is_no_mean_and_gives_no_scores_of_samples() -> None:
    """A thousandfold mean is an aggregate like any other: its error is the bootstrap's, or unknown."""
    task = task_of("t", acc=lambda values: 1000 * mean(values))
    found = results_of("t", {"acc,none": 750.0}, acc=RIGHT)
    metrics, scores = collect(found, [task], ["acc"], resample=True)
    assert scores == {}
    # The bootstrap's deviation is that of the sample without Bessel's correction.
    expected = 1000 * np.std(RIGHT) / 2
    assert metrics["acc"] == {"value": 750.0, "stderr": pytest.approx(expected, rel=0.1)}
    foreign, _ = collect(found, [task], ["acc"], resample=False)
    assert foreign["acc"] == {"value": 750.0, "stderr": None}


def test_every_filter_is_reported_and_the_plain_one_gives_the_scores() -> None:
    """With two filters a document is logged once for each, the plain one first."""
    found = results_of("t", {"acc,none": 0.75, "acc,strict": 0.25}, acc=RIGHT)
    strict = [{"doc_id": number, "acc": float(number == 0)} for number in range(4)]
    found["samples"]["t"] += strict
    metrics, scores = collect(found, [task_of("t", acc=mean)], ["acc"], resample=True)
    assert metrics["acc"]["value"] == 0.75
    assert metrics["acc,strict"] == {"value": 0.25, "stderr": None}
    assert [scores["t", n]["acc"] for n in range(4)] == RIGHT


def test_without_a_plain_filter_the_first_is_the_metric() -> None:
    """A task whose answers all go through filters of its own (AI2D) has no value under the plain name."""
    found = results_of("t", {"acc,letter": 0.75, "acc,strict": 0.25}, acc=RIGHT)
    metrics, scores = collect(found, [task_of("t", acc=mean)], ["acc"], resample=True)
    assert metrics["acc"]["value"] == 0.75
    assert metrics["acc,strict"] == {"value": 0.25, "stderr": None}
    assert [scores["t", n]["acc"] for n in range(4)] == RIGHT


def test_a_score_may_lie_in_a_table() -> None:
    found = results_of("t", {"acc,none": 0.75}, acc=[{"score": one, "id": 0} for one in RIGHT])
    _, scores = collect(found, [task_of("t", acc=mean)], [], resample=True)
    assert [scores["t", n]["acc"] for n in range(4)] == RIGHT


def test_tasks_of_a_group_keep_apart_and_come_as_asked() -> None:
    tasks = [task_of("a", acc=mean), task_of("b", acc=percent)]
    first = results_of("a", {"acc,none": 0.5}, acc=[1.0, 0.0])
    second = results_of("b", {"acc,none": 100.0}, acc=[1.0, 1.0])
    both = {name: first[name] | second[name] for name in first}
    metrics, scores = collect(both, tasks, ["b/acc", "a/acc"], resample=True)
    assert [(name, one["value"]) for name, one in metrics.items()] == [
        ("b/acc", 100.0),
        ("a/acc", 0.5),
    ]
    assert scores["a", 0] == {"a/acc": 1.0}
    assert scores["b", 1] == {"b/acc": 100.0}


def test_nan_is_no_value() -> None:
    found = results_of("t", {"acc,none": float("nan")}, acc=[float("nan"), 1.0])
    metrics, scores = collect(found, [task_of("t", acc=mean)], ["acc"], resample=False)
    assert metrics == {"acc": {"value": None, "stderr": None}}
    assert scores == {}
