"""A limit counts whole units of benchmarks that score several samples together, wherever they are in the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import run
from espalier.harness.evaluation.evaluate import Evaluation, evaluate_session, open_benchmark
from espalier.harness.store import Store
from tests.benchmarks.answering import AnsweringModel
from tests.benchmarks.fixtures import choices
from tests.benchmarks.hub import picture, write_repository
from tests.benchmarks.runs import SHELF, arguments, evaluation_of, spec_of

QUESTIONS, ROTATIONS = 6, 4


def write_rotations(root: Path, config: str) -> None:
    """Write six questions in four orders of their options: all originals first, as in the released files."""
    texts = ["red", "green", "blue", "white"]
    write_repository(
        root,
        "lmms-lab-encoder/MMBench",
        "dev",
        columns=choices.MMBENCH,
        rows=[
            {
                "index": 1_000_000 * turn + number,
                "question": f"Which colour is {number}?",
                "hint": "nan",
                "answer": "ABCD"[turn],
                **dict(
                    zip("ABCD", [*texts[-turn:], *texts[:-turn]] if turn else texts, strict=True)
                ),
                "category": "attribute_recognition",
                "image": picture(number),
                "source": "ours",
                "L2-category": "finegrained_perception (instance-level)",
                "comment": "nan",
                "split": "dev",
            }
            for turn in range(ROTATIONS)
            for number in range(QUESTIONS)
        ],
        config=config,
    )


def wrong_last_turn(doc: Any) -> str:
    """Answer every other question wrong in its last rotation alone."""
    turn, number = divmod(doc["index"], 1_000_000)
    return "B" if turn == ROTATIONS - 1 and number % 2 else str(doc["answer"])


def limited(name: str, data: Path, store: Path, limit: int | None, say: Any) -> Evaluation:
    spec = spec_of(name, data, store)
    return evaluation_of(replace(spec, benchmark=replace(spec.benchmark, limit=limit)), say)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "config"), [("mmbench_en", "en"), ("mmbench_cn", "cn")])
def test_a_limit_takes_questions_in_all_orders_of_their_options(
    name: str, config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_rotations(tmp_path / "data", config)
    scale = {"mmbench_en": 100.0, "mmbench_cn": 1.0}[name]
    for limit, samples, right in ((1, 4, 1), (6, 8, 1 / 2), (12, 12, 2 / 3), (99, 24, 1 / 2)):
        evaluation = limited(name, tmp_path / "data", tmp_path / str(limit), limit, wrong_last_turn)
        assert evaluation.n_samples == samples
        assert next(iter(evaluation.metrics.values()))["value"] == pytest.approx(scale * right)
        # Ids are those of the whole set, so that runs with and without a limit agree about samples.
        assert {sample.doc_id % QUESTIONS for sample in evaluation.samples} == set(
            range(samples // ROTATIONS)
        )
    assert "limit=6: 8 samples of" in capfd.readouterr().err


@pytest.mark.sampled
@pytest.mark.parametrize(("limit", "samples"), [(1, 2), (2, 2), (3, 4), (5, 6), (6, 6)])
def test_a_limit_takes_pairs_of_questions_about_a_picture(
    repositories: Callable[[str], Path], tmp_path: Path, limit: int, samples: int
) -> None:
    evaluation = limited(
        "mme", repositories("mme"), tmp_path, limit, lambda doc: str(doc["answer"])
    )
    assert evaluation.n_samples == samples
    values = {name: metric["value"] for name, metric in evaluation.metrics.items()}
    # 200 for each kind of question whose pairs are all right; the last pair is another kind, cognition.
    assert values["mme_perception_score"] == 100 * min(samples, 4)


def test_an_interrupted_run_takes_the_same_samples(
    repositories: Callable[[str], Path], tmp_path: Path
) -> None:
    spec = spec_of("mme", repositories("mme"), tmp_path)
    spec = replace(spec, benchmark=replace(spec.benchmark, limit=3))
    journal = Store(spec.store).run("0" * 16).journal
    loaded = open_benchmark(spec, shelf=SHELF)
    first = evaluate_session(
        spec, AnsweringModel(loaded.tasks, lambda doc: str(doc["answer"])), journal, loaded=loaded
    )
    loaded = open_benchmark(spec, shelf=SHELF)
    again = evaluate_session(
        spec, AnsweringModel(loaded.tasks, lambda doc: "?"), journal, loaded=loaded
    )
    assert (again.resumed, again.metrics) == (4, first.metrics)


@pytest.mark.slow
def test_the_row_counts_the_samples_that_were_asked(
    repositories: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In single runs and in a shared pass over two budgets."""
    words = [
        word
        for word in arguments("mme", repositories("mme"), tmp_path / "store")
        if not word.startswith("limit=")
    ]
    sweep = ["-m", *words, "limit=3", "method=uniform", "ratio=0.5,0.9", "engine.share=prefix"]
    assert run.main(sweep) == 0, capfd.readouterr().err
    assert [row["n_samples"] for row in Store(tmp_path / "store").rows()] == [4, 4]
