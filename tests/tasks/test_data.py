"""The scorers of own data: right, wrong, empty and malformed answers, with metrics by category."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from espalier.tasks.data import utils

DOC = {"question": "which ?", "images": ["/a.png"], "video": []}
CHOICE = DOC | {"choices": ["red", "", "blue"], "answers": ["blue"]}
NUMBER = DOC | {"answers": ["1,200"], "tolerance": [0.05, 0.0]}
TEXT = DOC | {"answers": ["red", "crimson"]}

Scorer = Callable[[dict[str, Any], list[Any]], dict[str, float]]


@pytest.mark.parametrize(
    ("score", "doc", "answer", "value", "unparsed"),
    [
        (utils.score_choice, CHOICE, "C. blue", 1, 0),
        (utils.score_choice, CHOICE, "A", 0, 0),
        (utils.score_choice, CHOICE, "A or C", 0, 1),
        (utils.score_yes_no, DOC | {"answers": ["No"]}, "No, it is not.", 1, 0),
        (utils.score_yes_no, DOC | {"answers": ["no"]}, "yes", 0, 0),
        (utils.score_yes_no, DOC | {"answers": ["no"]}, "perhaps", 0, 1),
        (utils.score_exact, TEXT, "Crimson.", 1, 0),
        (utils.score_exact, TEXT, "a red car", 0, 0),
        (utils.score_contains, TEXT, "a red car", 1, 0),
        (utils.score_number, NUMBER, "about 1250 kg", 1, 0),
        (utils.score_number, NUMBER, "1300", 0, 0),
        (utils.score_number, NUMBER, "1200 or 1300", 0, 1),
        (utils.score_anls, TEXT, "crimsom", pytest.approx(6 / 7), 0),
    ],
)
def test_a_score_and_what_could_not_be_read(
    score: Scorer, doc: dict[str, Any], answer: str, value: float, unparsed: float
) -> None:
    scores = score(doc | {"category": "x y"}, [answer])
    (metric,) = set(scores) - {"unparsed"} - {name for name in scores if name.endswith("_x_y")}
    assert scores == {metric: value, f"{metric}_x_y": value, "unparsed": unparsed}
    for malformed in ([], [None], [""]):
        scores = score(doc, malformed)
        assert scores["unparsed"] == 1
        assert scores[metric] == float(score is utils.score_yes_no and doc["answers"] == ["yes"])


def test_without_a_score_words_are_counted() -> None:
    assert utils.score_none(DOC, ["two words"]) == {"words": 2}


def test_the_prompt_is_the_question_then_a_line_for_each_option() -> None:
    settings = {"pre_prompt": "", "post_prompt": "\nThe letter."}
    assert utils.doc_to_text(CHOICE, settings) == "which ?\nA. red\nC. blue\nThe letter."
    (turn,) = utils.doc_to_messages(DOC | {"video": ["/b.mp4"]})
    assert [part["type"] for part in turn["content"]] == ["image", "video", "text"]
    assert (utils.doc_to_target(TEXT), utils.doc_to_target(CHOICE)) == (["red", "crimson"], "blue")
