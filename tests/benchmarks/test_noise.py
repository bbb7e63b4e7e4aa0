"""Noise in place of answers: no score rises with it, and what states nothing is counted, in every benchmark.

The score of noise is at most that of a constant wrong answer, or of none, which any benchmark has to allow. Benchmarks
with a closed set of answers give it nothing, but for POPE: its published rule maps all that is not a no to yes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.evaluation.evaluate import Evaluation, open_benchmark
from espalier.harness.paths import CONF
from tests import commands
from tests.benchmarks.fixtures import ANSWERS, FIXTURES, NOTHING, WRONG
from tests.benchmarks.hub import picture
from tests.benchmarks.noise import ILLEGIBLE, LOOPS, NOISE
from tests.benchmarks.runs import DRAWN, SHELF, Repositories, Scored, evaluation_of, spec_of

#: Benchmarks of this repository's own files: `latency` is scored by the clock.
EMBEDDED = sorted(path.stem for path in (CONF / "benchmark").glob(f"{DRAWN}*.yaml"))

#: Metrics that count and do not judge: words of an answer, or how many answers are yes.
COUNTS = ("words", "yes_ratio", "yes_ratio_lmms_eval", "unparsed")

#: Answers are an option, or a word or phrase.
CLOSED = {"pope", "mme", "ai2d", "scienceqa_img", "mmbench_en", "mmbench_cn", "mmstar"}
CLOSED |= {"videomme", "mlvu", "longvideobench", "mvbench"}
SHORT = {
    "gqa",
    "chartqa",
    "docvqa",
    "infovqa",
    "textvqa",
    "textvqa_ocr",
    "vizwiz",
    "okvqa",
    "vqav2",
}
#: A judge scores.
JUDGED = {"llava_bench", "mmbench_video", "video_detail_caption_judged"}

#: Benchmarks of similar texts: letters or words in common are worth something, whatever the text.
SIMILAR = {name: 0.25 for name in FIXTURES if name.startswith(("omnidocbench", "ocean_ocr"))}


def judges(metric: str) -> bool:
    return not metric.rpartition("/")[2].endswith((*COUNTS, "_lmms_eval"))


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", sorted(set(FIXTURES) - JUDGED))
def test_noise_is_worth_no_more_than_a_constant_wrong_answer(
    name: str, scored: Callable[[str], Scored]
) -> None:
    """Nor does a metric rise when it takes the place of every other right answer."""
    benchmark = scored(name)
    right = benchmark.metrics(ANSWERS[name])
    constants = [benchmark.metrics(lambda doc, text=text: text) for text in ("", NOTHING)]
    for kind, noise in NOISE.items():
        whole = benchmark.metrics(lambda doc, noise=noise: noise)
        turns = count()
        half = benchmark.metrics(
            lambda doc, noise=noise, turns=turns: noise if next(turns) % 2 else ANSWERS[name](doc)
        )
        for metric in filter(judges, right):
            sign = benchmark.better(metric)
            allowed = max(sign * values[metric] for values in constants)
            assert sign * whole[metric] <= allowed + SIMILAR.get(name, 0) + 1e-9, (kind, metric)
            if name in CLOSED - {"pope"} | SHORT | {"mmmu", "mathvision"}:
                assert whole[metric] == 0, (kind, metric)
            if metric in half:
                assert sign * half[metric] <= sign * right[metric] + 1e-9, (kind, metric)
        unread = [
            value for metric, value in whole.items() if metric.rpartition("/")[2] == "unparsed"
        ]
        if kind in ILLEGIBLE or name in CLOSED or (kind in LOOPS and name in SHORT):
            assert set(unread) <= {1}, kind


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(JUDGED | {"videomme_describe", "video_detail_caption"}))
def test_what_states_nothing_is_counted_where_no_task_tells(
    name: str, repositories: Repositories, tmp_path: Path
) -> None:
    turns = count()
    evaluation = evaluation_of(
        spec_of(name, repositories(name), tmp_path),
        lambda doc: NOISE["debris"] if next(turns) else ANSWERS[name](doc),
    )
    assert evaluation.unparsed == evaluation.n_samples - 1


@pytest.mark.sampled
@pytest.mark.parametrize("name", EMBEDDED)
def test_noise_is_worth_nothing_to_the_embedded_benchmarks(name: str, tmp_path: Path) -> None:
    spec = commands.spec_of(f"benchmark={name}", f"store={tmp_path}", "engine.paired=0")
    for task in open_benchmark(spec, shelf=SHELF).tasks:
        docs = [dict(task.eval_docs[number]) for number in range(6)]
        for kind, noise in NOISE.items():
            rows = [task.process_results(doc, [noise]) for doc in docs]
            assert {row.get(spec.benchmark.headline, 0) for row in rows} == {0}, kind
            assert kind != "empty" or all(row["unparsed"] for row in rows)


OWN_DATA: dict[str, tuple[str, Mapping[str, Any]]] = {
    "yes_no": ("yes", {}),
    "choice": ("B", {"choices": ["red", "green", "blue"]}),
    "number": ("12", {}),
    "exact": ("green", {}),
    "contains": ("green", {}),
    "anls": ("green shirt", {}),
}


def own_data(root: Path, score: str, answers: list[str], more: Mapping[str, Any]) -> Path:
    root.mkdir()
    lines = []
    for number, answer in enumerate(answers):
        picture(number).save(root / f"{number}.png")
        record = {"image": f"{number}.png", "question": "What is it?", "answer": answer, **more}
        lines.append(json.dumps(record))
    file = root / "asked.jsonl"
    file.write_text("\n".join(lines))
    return file


def of_own_data(tmp_path: Path, score: str, answers: list[str], say: Any) -> Evaluation:
    file = own_data(tmp_path / "data", score, answers, OWN_DATA[score][1])
    words = ["benchmark=data", f"benchmark.path={file}", f"benchmark.score={score}"]
    spec = commands.spec_of(*words, f"store={tmp_path / 'store'}", "engine.paired=0")
    return evaluation_of(spec, say)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("score", OWN_DATA)
def test_noise_is_worth_nothing_to_own_data(score: str, kind: str, tmp_path: Path) -> None:
    evaluation = of_own_data(tmp_path, score, [OWN_DATA[score][0]] * 2, lambda doc: NOISE[kind])
    assert next(iter(evaluation.metrics.values()))["value"] == 0
    if kind in (*ILLEGIBLE, *LOOPS) or score in ("yes_no", "choice", "number"):
        assert evaluation.unparsed == 2


def test_a_model_that_breaks_gains_nothing_on_own_yes_and_no(tmp_path: Path) -> None:
    """More yes than no: an answer that states neither is no yes."""
    evaluation = of_own_data(
        tmp_path, "yes_no", ["yes", "yes", "yes", "no"], lambda doc: "5 at <loc_16> ;"
    )
    metrics = {name: metric["value"] for name, metric in evaluation.metrics.items()}
    assert metrics == {"accuracy": 0, "unparsed": 1}


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(SHORT | {"pope", "mme"}))
def test_wrong_answers_are_read(name: str, scored: Callable[[str], Scored]) -> None:
    """What states a wrong answer is wrong, and not unread."""
    values = scored(name).metrics(WRONG.get(name, lambda doc: NOTHING))
    assert [
        value for metric, value in values.items() if metric.rpartition("/")[2] == "unparsed"
    ] == [0]
