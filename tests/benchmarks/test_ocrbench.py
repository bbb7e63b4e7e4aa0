"""OCRBench gives each sample a score: a mean over the samples, with errors and contributions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import commands
from tests.benchmarks.hub import PICTURE, TEXT, TEXTS, picture, write_repository
from tests.benchmarks.runs import arguments, evaluation_of

ROWS = 40


def write_ocrbench(root: Path) -> None:
    write_repository(
        root,
        "echo840/OCRBench",
        "test",
        columns={
            **dict.fromkeys(("question", "dataset", "question_type"), TEXT),
            **{"answer": TEXTS, "image": PICTURE},
        },
        rows=[
            {
                "question": "what is written in the image?",
                "dataset": "HME100k" if number % 2 else "IIIT5K",
                "question_type": "Regular Text Recognition",
                "answer": [f"word {number}."],
                "image": picture(number),
            }
            for number in range(ROWS)
        ],
    )


@pytest.mark.parametrize(("limit", "samples"), [(None, ROWS), (10, 10)])
def test_the_score_is_the_share_of_right_answers(
    tmp_path: Path, limit: int | None, samples: int
) -> None:
    write_ocrbench(tmp_path / "data")
    spec = commands.spec_of(*arguments("task:ocrbench", tmp_path / "data", tmp_path / "store"))
    spec = replace(spec, benchmark=replace(spec.benchmark, limit=limit))
    assert spec.benchmark.headline == "ocrbench_accuracy"

    def every_other(doc: dict[str, list[str]]) -> str:
        right = doc["answer"][0]
        return f"It says {right}" if int(right[5:-1]) % 4 < 2 else "; ;"

    right = sum(number % 4 < 2 for number in range(samples))
    for store in ("once", "twice"):
        evaluation = evaluation_of(replace(spec, store=tmp_path / store), every_other)
        accuracy = evaluation.metrics["ocrbench_accuracy"]
        assert accuracy["value"] == pytest.approx(right / samples)
        assert accuracy["stderr"] > 0
        published = evaluation.metrics["ocrbench_accuracy_lmms_eval"]["value"]
        assert published == pytest.approx(right / 1000)
        assert evaluation.aggregation["ocrbench_accuracy"]["how"] == "mean"
        scores = [score["ocrbench_accuracy"] for score in evaluation.scores.values()]
        assert scores == [float(number % 4 < 2) for number in range(samples)]
        assert evaluation.unparsed == samples - right
