"""Answers that cannot be read are wrong and counted, whatever the benchmark; reasoning is not scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from espalier.harness.evaluation.evaluate import Evaluation
from espalier.harness.evaluation.samples import Sample
from espalier.harness.specs.generation import spoken
from tests.benchmarks.fixtures import ANSWERS, Answer, answer
from tests.benchmarks.fixtures.choices import denied
from tests.benchmarks.hub import PICTURE, TEXT, picture, write_repository
from tests.benchmarks.runs import Repositories, evaluation_of, metrics_of, spec_of

LETTERS = ("ai2d", "scienceqa_img", "mmbench_en", "mmbench_cn", "mmstar")
YES_NO = ("pope", "mme")

#: Forms that state the letter in them.
FORMS = (
    *(
        "{}",
        "({})",
        "{}.",
        "**{}**",
        "Answer: {}",
        "The answer is {}.",
        "{}: a thing",
        "\uff08{}\uff09",
    ),
    *(
        "{}\n\nExplanation: E is another.",
        "The right option is {} because E is another.",
        "答案是{}",
    ),
)
HEDGES = ("Cannot tell", "Dunno", "Both A and B", "Not sure", "A thing is drawn", "")


@pytest.fixture
def evaluated(repositories: Repositories, tmp_path: Path) -> Callable[..., Evaluation]:
    """Return a function that evaluates answers, which a function of the document gives, each time in a store anew."""
    number = count()

    def evaluate(name: str, say: Answer) -> Evaluation:
        return evaluation_of(spec_of(name, repositories(name), tmp_path / str(next(number))), say)

    return evaluate


def headline(evaluation: Evaluation) -> float | None:
    return next(iter(evaluation.metrics.values()))["value"]


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", LETTERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_right_letter_is_right(
    evaluated: Callable[..., Evaluation], name: str, form: str
) -> None:
    plain = evaluated(name, ANSWERS[name])
    formed = evaluated(name, lambda doc: form.format(ANSWERS[name](doc)))
    assert (headline(formed), formed.unparsed) == (headline(plain), 0)
    assert formed.metrics["unparsed"]["value"] == 0


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [*LETTERS, "mme"])
@pytest.mark.parametrize("hedge", HEDGES)
def test_a_hedge_is_wrong_and_counted(
    evaluated: Callable[..., Evaluation], name: str, hedge: str
) -> None:
    evaluation = evaluated(name, lambda doc: hedge)
    assert (headline(evaluation), evaluation.unparsed) == (0, evaluation.n_samples)
    assert evaluation.metrics["unparsed"]["value"] == 1


@pytest.mark.parametrize("answer", ["Nothing can be said", "Not sure", "Now that is hard"])
def test_words_that_begin_like_no_are_not_no(
    evaluated: Callable[..., Evaluation], answer: str
) -> None:
    evaluation = evaluated("mme", lambda doc: answer if doc["answer"] == "No" else "Yes")
    # One of the two answers about each picture: 50 of 200 of each kind, where lmms-eval gives 200.
    values = {name: metric["value"] for name, metric in evaluation.metrics.items()}
    assert (values["mme_total"], values["mme_total_lmms_eval"]) == (150, 600)
    assert evaluation.unparsed == 3


@pytest.mark.parametrize("form", ["**{}**", "Answer: {}", "{}!", "{}, it is", "The answer is {}."])
def test_stated_yes_and_no_are_read(evaluated: Callable[..., Evaluation], form: str) -> None:
    evaluation = evaluated("mme", lambda doc: form.format(doc["answer"].lower()))
    assert (headline(evaluation), evaluation.unparsed) == (600, 0)


def pope(root: Path, answers: Sequence[str]) -> None:
    columns = dict.fromkeys(("id", "question_id", "question", "answer", "image_source"), TEXT)
    rows = [
        {
            "id": str(number),
            "question_id": str(number),
            "question": "Is there a square in the image?",
            "answer": right,
            "image_source": "x",
            "image": picture(0),
            "category": ("adversarial", "popular", "random")[number % 3],
        }
        for number, right in enumerate(answers)
    ]
    columns |= {"image": PICTURE, "category": TEXT}
    write_repository(root, "lmms-lab-encoder/POPE", "test", columns, rows)


@pytest.mark.parametrize(
    ("say", "f1", "unparsed"),
    [
        (
            lambda doc: "I cannot tell from this image." if int(doc["id"]) >= 6 else answer(doc),
            0.714,
            0.8,
        ),
        (lambda doc: answer(doc) if int(doc["id"]) % 5 else denied(doc), 0.8, 0),
        (lambda doc: f"{answer(doc).capitalize()}.", 1, 0),
    ],
)
def test_a_model_that_hedges_does_not_win_pope(
    tmp_path: Path, say: Callable[..., str], f1: float, unparsed: float
) -> None:
    """By LLaVA's script a hedge is a yes: F1 of six right answers and 24 hedges is 0.714, where lmms-eval has 1."""
    pope(tmp_path / "data", ["yes" if number % 2 else "no" for number in range(30)])
    metrics = metrics_of(spec_of("pope", tmp_path / "data", tmp_path / "store"), say)
    assert next(iter(metrics)) == "pope_f1_mean"
    assert metrics["pope_f1_mean"] == pytest.approx(f1, abs=5e-4)
    assert metrics["unparsed"] == pytest.approx(unparsed)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", [*LETTERS, *YES_NO, "mmmu", "gqa"])
@pytest.mark.parametrize("begin", ["<think>A, no, not so. ", "A, no, not so. "])
def test_reasoning_is_not_scored_and_kept(
    evaluated: Callable[..., Evaluation], name: str, begin: str
) -> None:
    plain = evaluated(name, ANSWERS[name])
    thoughtful = evaluated(name, lambda doc: f"{begin}</think>\n{ANSWERS[name](doc)}")
    assert (thoughtful.metrics, thoughtful.unparsed) == (plain.metrics, plain.unparsed)
    assert all(sample.answer.startswith(begin) for sample in thoughtful.samples)


@pytest.mark.parametrize("name", ["mmstar", "pope", "gqa"])
def test_reasoning_that_never_ends_is_no_answer(
    evaluated: Callable[..., Evaluation], name: str
) -> None:
    evaluation = evaluated(name, lambda doc: f"<think>It may be {ANSWERS[name](doc)}")
    assert evaluation.unparsed == evaluation.n_samples
    if name != "pope":
        assert headline(evaluation) == 0


@pytest.mark.parametrize(("value", "right"), [("strip", 1), ("keep", 0)])
def test_kept_reasoning_is_scored_and_survives_the_journal(
    repositories: Repositories, tmp_path: Path, value: str, right: float
) -> None:
    spec = spec_of("gqa", repositories("gqa"), tmp_path)
    spec = replace(spec, model=replace(spec.model, generation={"thinking": value}))
    evaluation = evaluation_of(spec, lambda doc: f"<think>x</think>{ANSWERS['gqa'](doc)}")
    assert headline(evaluation) == right
    for sample in evaluation.samples:
        stored = Sample.from_entry(sample.entry())
        assert (stored.scored, stored.reasoning) == (sample.scored, sample.reasoning)
        assert (sample.scored == sample.answer) == (not right)


@pytest.mark.parametrize(
    ("answer", "scored"),
    [
        ("The sign says <think> in red", "The sign says <think> in red"),
        (" \n<think>It may be B", ""),
        ("<think>It may be B</think> B", " B"),
        ("It may be B</think> B", " B"),
        ("<think>a</think> It reads <think>", " It reads <think>"),
    ],
)
def test_a_tag_read_off_a_picture_is_no_reasoning(answer: str, scored: str) -> None:
    assert spoken(answer) == scored
