"""MMBench by rule: the letters that answers name, and questions over all rotations of their options."""

from __future__ import annotations

import random
import socket
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from lmms_eval.tasks.mmbench.cn_utils import mmbench_evaluator

from espalier.tasks.mmbench.letters import ROTATION, letter_of, share_of_questions
from espalier.tasks.mmbench.utils import process_results

OPTIONS = {"A": "黄色", "B": "绿色", "C": "蓝色", "D": None}
#: What models say, and what it names of these options.
SAID = {
    "A": "A",
    "B.": "B",
    "(C)": "C",
    "答案是B": "B",
    "答案是 C。": "C",
    "绿色": "B",
    "是绿色或者黄色": "",
    "The answer is (B).": "B",
    # Two letters are none; lmms-eval takes the one at the beginning.
    "A or B": "",
    "": "",
    "   ": "",
    "不知道": "",
    "qqq": "",
    # A letter without an option.
    "D": "",
}


@pytest.mark.parametrize(("answer", "wanted"), SAID.items())
def test_letters(answer: str, wanted: str) -> None:
    assert letter_of(OPTIONS | {"prediction": answer.strip()}) == wanted


@pytest.mark.parametrize(
    ("results", "right", "unparsed"),
    [(["B"], True, 0), (["A"], False, 0), ([""], False, 1), ([], False, 1), ([None], False, 1)],
)
def test_perfect_wrong_and_empty_answers(results: list[Any], right: bool, unparsed: int) -> None:
    scores = process_results(OPTIONS | {"index": 7, "answer": "B"}, results)
    assert scores == {"accuracy": {"index": 7, "right": right}, "unparsed": unparsed}


def test_a_question_counts_if_every_rotation_is_right_by_hand() -> None:
    samples = [
        {"index": 1, "right": True},
        {"index": 1 + ROTATION, "right": True},
        {"index": 2, "right": True},
        {"index": 2 + 3 * ROTATION, "right": False},
        {"index": 3, "right": True},
        # The question of this rotation is not asked.
        {"index": 4 + ROTATION, "right": True},
    ]
    assert share_of_questions(samples) == pytest.approx(2 / 3)


def items(rng: random.Random) -> list[dict[str, Any]]:
    """Make questions in one to four rotations, with answers of every kind."""
    docs = []
    for question in range(1, 9):
        for turn in range(rng.randint(1, 4)):
            options = OPTIONS | ({"C": None} if question % 3 == 0 else {})
            docs.append(
                options
                | {
                    "index": question + turn * ROTATION,
                    "answer": rng.choice("AB"),
                    "prediction": rng.choice(
                        [*(text for text in SAID if text != "A or B"), "A", "B"]
                    ),
                    "question": "?",
                    "category": "c",
                    "L2-category": "l",
                }
            )
    rng.shuffle(docs)
    return docs


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(25))
def test_clear_answers_score_as_by_lmms_evals_static_evaluation(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which asks nobody: no connection can be opened here, and the generator of random numbers is of no account."""

    def refuse(*args: Any, **more: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    docs = items(random.Random(seed))
    samples = [
        {"index": doc["index"], "right": letter_of(doc | {"prediction": doc["prediction"].strip()}) == doc["answer"]}
        for doc in docs
    ]  # fmt: skip
    stripped = [doc | {"prediction": doc["prediction"].strip()} for doc in docs]
    with redirect_stdout(StringIO()):
        wanted, _, _ = mmbench_evaluator.eval_result(stripped, eval_method="static")
    assert share_of_questions(samples) == pytest.approx(wanted)
