"""Cases worked out by hand from the definition of each metric, through the benchmark's own task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.fixtures import ANSWERS, Answer
from tests.benchmarks.fixtures import answer as right_answer
from tests.benchmarks.fixtures.choices import denied
from tests.benchmarks.runs import Repositories, Scored, metrics_of, spec_of

Open = Callable[[str], Scored]


def saying(text: str) -> Answer:
    return lambda doc: text


VQA = ("vqav2", "textvqa", "textvqa_ocr")

#: Benchmarks, what is said to both of their questions, the metric, and what it is worth to each of the two.
WORTH: list[tuple[str, str, str, float, float]] = [
    # Ten of ten say yellow; seven say two and three say three. Of the ten ways to leave one annotator out, seven
    # leave three of three, which is a full point, and three leave two, which is two thirds.
    *((name, "yellow", "exact_match", 1.0, 0.0) for name in VQA),
    *((name, "two", "exact_match", 0.0, 1.0) for name in VQA),
    *((name, "three", "exact_match", 0.0, (7 * 1 + 3 * 2 / 3) / 10) for name in VQA),
    # Case, articles, full stops, and numbers as words do not count.
    *((name, "The Yellow.", "exact_match", 1.0, 0.0) for name in VQA),
    *((name, "2", "exact_match", 0.0, 1.0) for name in VQA),
    *((name, "yellow square", "exact_match", 0.0, 0.0) for name in VQA),
    # Two of ten annotators: eight of the ten subsets of nine hold both, two hold one.
    ("okvqa", "standing", "exact_match", (8 * 2 / 3 + 2 * 1 / 3) / 10, 0.0),
    ("vizwiz", "Unanswerable", "exact_match", 1.0, 0.0),
    # The nearer of two references counts: one letter of ten is wrong, two of eight.
    ("docvqa", "Paul Smyth", "anls", 0.9, 0.0),
    ("docvqa", "P. Smytt", "anls", 0.75, 0.0),
    ("docvqa", "paul smith", "anls", 1.0, 0.0),
    # Three letters of six: what is exactly half right still counts, as in the challenge's script.
    ("docvqa", "12 xyz", "anls", 0.0, 0.5),
    ("docvqa", "1 wxyz", "anls", 0.0, 0.0),
    ("infovqa", "1,200", "anls", 1.0, 0.0),
]


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("name", "answer", "metric", "first", "second"), WORTH)
def test_an_answer_is_worth_what_the_definition_says(
    scored: Open, name: str, answer: str, metric: str, first: float, second: float
) -> None:
    assert scored(name).metrics(saying(answer))[metric] == pytest.approx((first + second) / 2)


@pytest.mark.parametrize(
    ("answer", "number", "word"),
    [
        *(("42", 1.0, 0.0), ("38", 1.0, 0.0), ("42.01", 0.0, 0.0), ("37.99", 0.0, 0.0)),
        *(("40.0", 1.0, 0.0), ("40%", 0.0, 0.0), ("about 40", 0.0, 0.0)),
        *(("norway", 0.0, 1.0), ("Norwai", 0.0, 0.0)),
    ],
)
def test_a_number_may_be_five_percent_off_and_a_word_may_not(
    scored: Open, answer: str, number: float, word: float
) -> None:
    metrics = scored("chartqa").metrics(saying(answer))
    assert metrics["relaxed_overall"] == (number + word) / 2
    if "relaxed_human_split" in metrics:
        assert metrics["relaxed_human_split"] == number
        assert metrics["relaxed_augmented_split"] == word


@pytest.mark.parametrize(
    ("answer", "kinds", "f1", "accuracy", "unparsed"),
    [
        # Three of six are yes, one of each kind. Always yes: precision 1/2, recall 1; always no: neither is defined.
        (saying("yes"), (2 / 3, 2 / 3, 2 / 3), 2 / 3, 0.5, 0),
        (saying("Yes"), (2 / 3, 2 / 3, 2 / 3), 2 / 3, 0.5, 0),
        (saying("no"), (0, 0, 0), 0.0, 0.5, 0),
        # Yes but for the first, which is yes: of all precision 2/5, recall 2/3; of its kind both are 0.
        (lambda doc: "no" if doc["id"] == "0" else "yes", (0, 2 / 3, 2 / 3), 0.5, 1 / 3, 0),
        # Right but for two of one kind: of all precision and recall are 2/3.
        (
            lambda doc: denied(doc) if doc["category"] == "popular" else right_answer(doc),
            (1, 0, 1),
            2 / 3,
            2 / 3,
            0,
        ),
        # What is neither counts as a yes, and is counted.
        (
            lambda doc: "a horse" if doc["id"] == "1" else right_answer(doc),
            (2 / 3, 1, 1),
            6 / 7,
            5 / 6,
            1,
        ),
        (saying("Yes, there is."), (2 / 3, 2 / 3, 2 / 3), 2 / 3, 0.5, 0),
        (saying("There is not. Yes?"), (0, 0, 0), 0.0, 0.5, 6),
        # Not among the script's words for no: a yes that the answer does not state.
        (saying("**No**"), (2 / 3, 2 / 3, 2 / 3), 2 / 3, 0.5, 6),
    ],
)
def test_f1_of_each_kind_and_of_all(
    scored: Open,
    answer: Answer,
    kinds: tuple[float, float, float],
    f1: float,
    accuracy: float,
    unparsed: int,
) -> None:
    metrics = scored("pope").metrics(answer)
    assert metrics["pope_f1_mean"] == pytest.approx(sum(kinds) / 3)
    assert metrics["pope_f1_score"] == pytest.approx(f1)
    assert metrics["pope_accuracy"] == pytest.approx(accuracy)
    assert metrics["unparsed"] == pytest.approx(unparsed / 6)


@pytest.mark.parametrize(
    ("answer", "each"),
    [
        # Half of the answers are right, and of no picture both.
        (saying("yes"), 50.0),
        (saying("No."), 50.0),
        (lambda doc: doc["answer"].upper() + ", of course", 200.0),
        (saying("perhaps"), 0.0),
    ],
)
def test_a_picture_counts_again_if_both_of_its_answers_are_right(
    scored: Open, answer: Answer, each: float
) -> None:
    """Two kinds of perception and one of cognition; each has accuracy and accuracy+ in percent."""
    metrics = scored("mme").metrics(answer)
    assert metrics["mme_perception_score"] == pytest.approx(2 * each)
    assert metrics["mme_cognition_score"] == pytest.approx(each)


def test_a_question_counts_if_all_orders_of_its_options_are_right(scored: Open) -> None:
    """Three questions, the last in two orders: right in one of them alone, it does not count."""

    def first_order(doc: Any) -> str:
        return "D" if doc["index"] > 1_000_000 else str(doc["answer"])

    assert scored("mmbench_en").metrics(first_order)["gpt_eval_score"] == pytest.approx(200 / 3)


@pytest.mark.sampled(30)
@pytest.mark.parametrize(
    ("form", "right", "theirs"),
    [
        *(("{}", 1, 1), ("{}. that one", 1, 1), ("The answer is {}", 1, 0), ("{} it is", 1, 0)),
        *(("Cannot tell", 0, 0), ("", 0, 0)),
    ],
)
@pytest.mark.parametrize("name", ["scienceqa_img", "ai2d"])
def test_lmms_eval_wants_the_letter_first_or_alone(
    repositories: Repositories, tmp_path: Path, name: str, form: str, right: float, theirs: float
) -> None:
    """In a run, since lmms-eval's filters read an answer before the task does."""
    spec = spec_of(name, repositories(name), tmp_path)
    assert metrics_of(spec, lambda doc: form.format(ANSWERS[name](doc))) == {
        "exact_match": right,
        "exact_match_lmms_eval": theirs,
        "unparsed": 1 - right,
    }


@pytest.mark.parametrize(
    ("form", "right", "unparsed"),
    [
        *(("({})", 1, 0), ("The answer is {}.", 1, 0), ("{} it is", 1, 0)),
        # An open question is answered by any text, and no option named by it; by nothing neither.
        *(("I cannot say.", 0, 2 / 3), (" ", 0, 1)),
    ],
)
def test_an_option_of_mmmu_is_read_and_never_drawn(
    scored: Open, form: str, right: float, unparsed: float
) -> None:
    metrics = scored("mmmu").metrics(lambda doc: form.format(doc["answer"]))
    assert metrics["mmmu_acc"] == pytest.approx(right, abs=1e-4)
    assert right or metrics["mmmu_acc_lmms_eval"] == 0
    assert metrics["unparsed"] == pytest.approx(unparsed)


#: What is said about two problems, one of which asks for the letter B, whose option is 4, and one for the number 4; the
#: share of right answers, that of the released script, and the share that cannot be read.
PROBLEMS: list[tuple[Answer, float, float, float]] = [
    (lambda doc: rf"So it is \boxed{{{doc['answer']}}}.", 100, 100, 0),
    # The last box is the answer.
    (lambda doc: rf"First \boxed{{1}}, then \boxed{{{doc['answer']}}}", 100, 100, 0),
    (lambda doc: f"The answer is {doc['answer']}.", 100, 100, 0),
    (saying(r"\boxed{7}"), 0, 0, 0.5),  # of options no value
    (lambda doc: f"**{doc['answer']}**", 100, 50, 0),
    (lambda doc: rf"\boxed{{\text{{{doc['answer']}}}}}", 100, 100, 0),
    *((saying(text), 0, 0, 1) for text in ("zorp wug", "<loc_4> ; ;", "")),
    # An option is read by its value too.
    *(
        (lambda doc, text=text: text if doc["options"] else "4", 100, 100, 0)
        for text in (r"\boxed{\sqrt{16}}", r"\boxed{\frac82}", "4", "B. 4")
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["mathvision", "mathvision_testmini"])
@pytest.mark.parametrize(("answer", "right", "released", "unparsed"), PROBLEMS)
def test_mathvision_reads_what_the_released_script_misses(
    scored: Open, name: str, answer: Answer, right: float, released: float, unparsed: float
) -> None:
    metrics = scored(name).metrics(answer)
    assert metrics["mathvision_standard_eval"] == right
    assert metrics["mathvision_standard_eval_lmms_eval"] <= released
    assert metrics["unparsed"] == unparsed


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["gqa", "chartqa", "vqav2", "textvqa", "okvqa", "vizwiz", "docvqa"]
)
@pytest.mark.parametrize(
    ("answer", "unparsed"),
    [("", 1), ("; <loc_4>", 1), (" ".join(f"w{number}" for number in range(40)), 1), ("zorp", 0)],
)
def test_short_answers_that_state_nothing_are_counted_and_scored_as_before(
    scored: Open, name: str, answer: str, unparsed: float
) -> None:
    metrics = scored(name).metrics(saying(answer))
    assert (metrics.pop("unparsed"), set(metrics.values())) == (unparsed, {0})


@pytest.mark.parametrize("name", ["gqa", "chartqa", "vqav2", "textvqa", "docvqa"])
def test_right_short_answers_are_read(scored: Open, name: str) -> None:
    assert scored(name).metrics(ANSWERS[name])["unparsed"] == 0
