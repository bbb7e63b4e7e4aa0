"""From lmms-eval's results to contributions of samples: derived metrics, clusters, groups, filters, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lmms_eval.tasks.mme.utils import mme_aggregate_results
from lmms_eval.tasks.pope.utils import pope_aggregate_accuracy, pope_aggregate_f1_score

from espalier.harness.errors import UserError
from espalier.harness.evaluation.journal_scores import read_scorings
from espalier.harness.evaluation.lmms_tasks import quiet
from espalier.harness.evaluation.metric_scores import check_derived, members_of, needed_metrics
from espalier.harness.evaluation.sample_contributions import ScoredRun, score
from espalier.harness.evaluation.samples import score_entries
from espalier.harness.evaluation.upstream import tokens_remembered
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, Cluster, Derived
from espalier.harness.stats import by_unit
from tests.evaluation.test_influence import pairs, yes_no
from tests.refused import refused

Aggregations = dict[str, Callable[..., Any]]


def task_of(name: str, aggregations: Aggregations) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(task=name), aggregation=lambda: aggregations, eval_docs=[]
    )


def bench(*metrics: str, **settings: Any) -> BenchmarkSpec:
    return BenchmarkSpec("b", "b", None, None, metrics, metrics[0] if metrics else "", **settings)


def logged(values: Sequence[dict[str, Any]], docs: Sequence[dict[str, Any]] | None = None) -> Any:
    docs = docs or [{}] * len(values)
    return [
        {"doc_id": i, "doc": doc, **scores}
        for i, (scores, doc) in enumerate(zip(values, docs, strict=True))
    ]


def run(
    tables: dict[str, tuple[Aggregations, Any]], benchmark: BenchmarkSpec, ours: bool = False
) -> ScoredRun:
    """Aggregate as lmms-eval does, then score."""
    results = {
        "results": {
            name: {
                f"{metric},none": function([s[metric] for s in samples if metric in s])
                for metric, function in functions.items()
                if any(metric in s for s in samples)
            }
            for name, (functions, samples) in tables.items()
        },
        "samples": {name: samples for name, (_, samples) in tables.items()},
    }
    tasks = [task_of(name, functions) for name, (functions, _) in tables.items()]
    with quiet():
        return score(results, tasks, benchmark, ours)


def shares(scored: ScoredRun, metric: str) -> np.ndarray[Any, Any]:
    """One number a unit."""
    keys = [key for key, scores in scored.scores.items() if metric in scores]
    units = [(key[0], scored.units.get(key, {}).get(metric, key[1])) for key in keys]
    return by_unit(np.array([scored.scores[key][metric] for key in keys]), units)


def mme(images: int, seed: int = 0) -> tuple[Aggregations, Any]:
    """As lmms-eval's MME: a sample has one of two metrics."""
    functions: Aggregations = {
        "perception": mme_aggregate_results,
        "cognition": mme_aggregate_results,
    }
    values, docs = [], []
    for pair in pairs(np.random.default_rng(seed), images):
        kind = "cognition" if pair["question_id"] % 4 == 0 else "perception"
        values.append({kind: pair})
        docs.append({"question_id": f"{pair['question_id']}.png", "index": pair["question_id"]})
    return functions, logged(values, docs)


MME = bench(
    "sum",
    "perception",
    derived={"sum": Derived("sum", ("perception", "cognition"))},
    cluster=Cluster("question_id"),
)


def test_a_sum_of_metrics_with_samples_of_their_own_has_contributions_of_all() -> None:
    scored = run({"mme": mme(120)}, MME)
    assert list(scored.metrics) == ["sum", "perception"]
    total = scored.metrics["sum"]
    contributions = shares(scored, "sum")
    assert len(contributions) == 120
    assert contributions.mean() == pytest.approx(total["value"])
    assert contributions.std(ddof=1) / 120**0.5 == pytest.approx(total["stderr"])
    assert scored.how["sum"] == {"how": "combined", "samples": 240, "units": 120, "note": None}
    assert scored.how["perception"] == {
        "how": "influence",
        "samples": 180,
        "units": 90,
        "note": None,
    }
    # Perception and cognition are of different images, so their variances add up.
    parts = run({"mme": mme(120)}, replace(MME, metrics=("perception", "cognition"), derived={}))
    errors = [parts.metrics[name]["stderr"] for name in ("perception", "cognition")]
    assert total["stderr"] == pytest.approx(np.hypot(*errors), rel=0.02)


def test_clusters_are_as_well_a_column_modulo_a_number() -> None:
    functions, samples = mme(60)
    by_name = run({"mme": (functions, samples)}, MME)
    for number, sample in enumerate(samples):
        sample["doc"]["index"] += 1000 * (number % 2)
    by_index = run({"mme": (functions, samples)}, replace(MME, cluster=Cluster("index", 1000)))
    assert by_index == by_name


def test_a_column_for_clusters_must_be_there() -> None:
    with pytest.raises(
        UserError, match=r"benchmark\.cluster='picture' is not a column of mme; valid: quest"
    ):
        run({"mme": mme(20)}, replace(MME, cluster=Cluster("picture")))
    with pytest.raises(
        UserError, match=r"column='question_id' is '0.png' in mme/0; valid: integers"
    ):
        run({"mme": mme(20)}, replace(MME, cluster=Cluster("question_id", 10)))


def split(seed: int, n: int) -> tuple[Aggregations, Any]:
    functions: Aggregations = {"f1": pope_aggregate_f1_score, "accuracy": pope_aggregate_accuracy}
    values = [
        {"f1": answer, "accuracy": answer} for answer in yes_no(np.random.default_rng(seed), n)
    ]
    return functions, logged(values)


POPE = bench("mean_f1", "a/accuracy", derived={"mean_f1": Derived("mean", ("*/f1",))})


def test_a_mean_over_the_tasks_of_a_group() -> None:
    tables = {
        name: split(seed, n) for seed, (name, n) in enumerate((("a", 60), ("b", 90), ("c", 60)))
    }
    scored = run(tables, POPE)
    each = [functions["f1"]([s["f1"] for s in samples]) for functions, samples in tables.values()]
    assert scored.metrics["mean_f1"]["value"] == pytest.approx(np.mean(each))
    assert list(scored.metrics) == ["mean_f1", "a/accuracy"]
    contributions = shares(scored, "mean_f1")
    assert (len(contributions), contributions.mean()) == (210, pytest.approx(np.mean(each)))
    # Each of the three counts a third, whatever its size.
    separate = run(tables, replace(POPE, metrics=("a/f1", "b/f1", "c/f1"), derived={}))
    errors = np.array([metric["stderr"] for metric in separate.metrics.values()], dtype=float)
    expected = float(np.sqrt((errors**2).sum()) / 3)
    assert scored.metrics["mean_f1"]["stderr"] == pytest.approx(expected, rel=0.02)
    # A mean over samples stays what it was: the samples' own scores.
    accuracies = {
        key: scores["a/accuracy"] for key, scores in scored.scores.items() if "a/accuracy" in scores
    }
    assert set(accuracies.values()) == {0.0, 1.0}


def test_members_are_listed_and_missing_ones_named() -> None:
    tasks = [task_of(name, split(0, 2)[0]) for name in ("a", "b")]
    assert members_of(Derived("mean", ("*/f1", "b/accuracy")), ["a/f1", "b/f1", "b/accuracy"]) == [
        *("a/f1", "b/f1", "b/accuracy")
    ]
    assert needed_metrics(POPE, tasks) == ("a/accuracy", "a/f1", "b/f1")
    assert needed_metrics(bench(), tasks) == ()
    check_derived(tasks, POPE)
    assert "benchmark.derived.x: '*/f2' is unknown; valid: a/accuracy" in refused(
        check_derived, tasks, bench("x", derived={"x": Derived("sum", ("*/f2",))})
    )
    assert "benchmark.derived.a/f1 is a metric of the task itself" in refused(
        check_derived, tasks, bench("a/f1", derived={"a/f1": Derived("sum", ("b/f1",))})
    )


def test_of_two_filters_the_plain_one_contributes() -> None:
    functions, samples = split(0, 50)
    results: Any = {
        "results": {
            "t": {"f1,none": functions["f1"]([s["f1"] for s in samples]), "f1,strict": 0.25}
        },
        "samples": {
            "t": [*samples, *logged([{"f1": s["f1"] | {"prediction": "no"}} for s in samples])]
        },
    }
    scored = score(results, [task_of("t", functions)], bench("f1"), ours=False)
    assert scored.metrics["f1,strict"] == {"value": 0.25, "stderr": None}
    assert shares(scored, "f1").mean() == pytest.approx(scored.metrics["f1"]["value"])
    assert len(scored.scores) == 50


def scored_by(function: Callable[..., float], benchmark: BenchmarkSpec) -> ScoredRun:
    """Score 40 answers with an F1, and their contributions with a function that stands for it."""
    _, samples = split(0, 40)
    value = pope_aggregate_f1_score([sample["f1"] for sample in samples])
    results: Any = {"results": {"t": {"f1,none": value}}, "samples": {"t": samples}}
    return score(results, [task_of("t", {"f1": function})], benchmark, ours=False)


def test_what_a_task_writes_goes_to_a_folder_that_goes_away(tmp_path: Path) -> None:
    paths: list[Path] = []

    def writing(values: Any, args: Any) -> float:
        path = Path(args.output_path) / "results.json"
        path.write_text(json.dumps(values))
        paths.append(path)
        return float(pope_aggregate_f1_score(values))

    scored = scored_by(writing, bench("f1"))
    assert shares(scored, "f1").mean() == pytest.approx(scored.metrics["f1"]["value"])
    assert len(paths) > 40
    assert not any(path.exists() for path in paths)


def test_an_aggregation_is_called_again_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def loud(values: Any) -> float:
        print("noise")
        print("noise", file=sys.stderr)
        calls.append(len(values))
        return float(pope_aggregate_f1_score(values))

    assert scored_by(loud, bench("f1")).how["f1"]["how"] == "influence"
    assert calls.count(39) == 40
    assert capsys.readouterr() == ("", "")
    calls.clear()
    scored_by(loud, bench("f1", blocks=0))
    assert calls == []


def test_a_benchmark_may_forbid_it_and_a_changing_value_does() -> None:
    scored = run({"t": split(0, 40)}, bench("f1", blocks=0))
    assert scored.how["f1"] == {
        "how": "once",
        "samples": 0,
        "units": 0,
        "note": "benchmark.blocks=0: computed once only",
    }
    values = iter(range(100))
    changing = {"f1": lambda raw: float(next(values))}
    scored = run({"t": (changing, split(0, 40)[1])}, bench("f1"))
    assert scored.how["f1"]["note"].startswith("computed again it is ")
    unsure = run(
        {
            "t": (
                changing | {"f1": lambda raw: float(np.median([len(str(r)) for r in raw]))},
                split(0, 9)[1],
            )
        },
        bench("all", derived={"all": Derived("sum", ("f1",))}),
    )
    assert unsure.metrics["all"]["value"] is not None
    assert unsure.how["all"]["note"].startswith("f1: ")


def test_blocks_are_the_units_in_the_journal() -> None:
    scored = run({"t": split(0, 400)}, bench("f1", "accuracy", blocks=50))
    scorings = read_scorings(
        score_entries(scored.scores, scored.units, scored.values, scored.sample_scores)
    )
    units = {scoring.units.get("f1", key[1]) for key, scoring in scorings.items()}
    assert len(units) == scored.how["f1"]["units"] == 50
    # A mean needs none: each sample is a unit of its own.
    assert scored.how["accuracy"]["units"] == 400
    assert all("accuracy" not in scoring.units for scoring in scorings.values())
    assert scorings["t", 3].values["f1"]["prediction"] in ("yes", "no")
    exact = run({"t": split(0, 400)}, bench("f1")).metrics["f1"]["stderr"]
    assert scored.metrics["f1"]["stderr"] == pytest.approx(exact, rel=0.3)


def test_errors_of_our_own_tasks_stay_the_bootstraps() -> None:
    mine, foreign = (run({"t": split(0, 60)}, bench("f1"), ours=ours) for ours in (True, False))
    assert mine.scores == foreign.scores
    assert mine.metrics["f1"]["stderr"] != foreign.metrics["f1"]["stderr"]
    assert mine.metrics["f1"]["stderr"] == pytest.approx(foreign.metrics["f1"]["stderr"], rel=0.15)


def test_a_mean_in_disguise_gives_every_sample_its_score() -> None:
    """As MMMU's: the answer is judged by the aggregation."""

    def judged(values: Sequence[dict[str, str]]) -> float:
        return round(sum(value["said"] == value["true"] for value in values) / len(values), 5)

    values = [{"acc": {"said": "A", "true": "AB"[i % 3 == 0]}} for i in range(7)]
    scored = run({"t": ({"acc": judged}, logged(values))}, bench("acc"))
    assert scored.how["acc"]["how"] == "mean"
    assert [scores["acc"] for scores in scored.scores.values()] == [
        float(i % 3 != 0) for i in range(7)
    ]
    assert scored.metrics["acc"]["stderr"] == pytest.approx(
        np.std([0, 1, 1, 0, 1, 1, 0], ddof=1) / 7**0.5
    )


def test_unparsed_answers_are_counted_where_the_task_marks_them() -> None:
    mean = {"acc": lambda v: float(np.mean(v)), "unparsed": lambda v: float(np.mean(v))}
    samples = logged([{"acc": 0.0, "unparsed": float(i < 2)} for i in range(5)])
    assert run({"t": (mean, samples)}, bench("acc")).unparsed == 2
    silent = logged([{"acc": 0.0} for _ in range(5)])
    assert run({"t": ({"acc": mean["acc"]}, silent)}, bench("acc")).unparsed is None
    tables = {"t": (mean, samples), "u": ({"acc": mean["acc"]}, silent)}
    assert run(tables, bench("t/acc")).unparsed is None


def test_captions_go_to_the_tokenizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class PTBTokenizer:
        def tokenize(self, captions: dict[Any, list[dict[str, str]]]) -> dict[Any, list[str]]:
            calls.extend(entry["caption"] for group in captions.values() for entry in group)
            return {k: [entry["caption"].lower() for entry in v] for k, v in captions.items()}

    name = "pycocoevalcap.tokenizer.ptbtokenizer"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(PTBTokenizer=PTBTokenizer))
    real = PTBTokenizer.tokenize
    with tokens_remembered():
        first = PTBTokenizer().tokenize({7: [{"caption": "A dog"}, {"caption": "Two"}]})
        again = PTBTokenizer().tokenize({1: [{"caption": "Two"}], 2: [{"caption": "New"}]})
    assert (first, again) == ({7: ["a dog", "two"]}, {1: ["two"], 2: ["new"]})
    assert calls == ["A dog", "Two", "New"]
    assert PTBTokenizer.tokenize is real
