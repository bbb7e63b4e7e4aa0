"""Questions about videos: asked as lmms-eval asks them, and scored so that no answer is not a right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import yaml
from lmms_eval.tasks.mlvu import utils as mlvu
from lmms_eval.tasks.mvbench import utils as mvbench
from lmms_eval.tasks.videomme import utils as videomme

from espalier.harness.paths import ROOT
from espalier.tasks.video_questions import utils
from tests import commands

FOLDER = ROOT / "tasks/video_questions"

VIDEOMME = {"question": "Who?", "options": ["A. I.", "B. You.", "C. They.", "D. No one."]}
MVBENCH = {"question": "Which?", "candidates": ["red", "green", "blue"], "answer": "green"}
LONG = {
    "id": "a",
    "question": "What?",
    **{f"option{n}": text for n, text in enumerate(["a tree", "a car", "N/A", "N/A", "N/A"])},
    "correct_choice": 1,
    "duration_group": 15,
    "question_category": "S2E",
}


class _Plain(yaml.SafeLoader):
    """Reads a task file and runs nothing of it."""


_Plain.add_multi_constructor("!", lambda loader, suffix, node: node.value)


def settings(module: ModuleType, name: str) -> dict[str, Any]:
    """Return the prompt settings of one of lmms-eval's task files."""
    text = (ROOT / module.__file__).with_name(name).read_text()
    return dict(yaml.load(text, _Plain)["lmms_eval_specific_kwargs"])


def ours(name: str) -> dict[str, Any]:
    text = (FOLDER / f"{name}.yaml").read_text()
    return dict(yaml.load(text, _Plain)["lmms_eval_specific_kwargs"])


DOOR = {"question": "Which door?\n(A) Red\n(B) Green"}

#: Ours and theirs: what asks, and the settings of the task file.
ASKED = [
    *(
        ((utils.videomme_text, "videomme_questions"), (videomme, "videomme", family), VIDEOMME)
        for family in ("default", "llava_vid", "qwen3_vl")
    ),
    ((utils.mlvu_text, "mlvu_questions"), (mlvu, "mlvu_dev", "default"), DOOR),
    (
        (utils.mvbench_text, "mvbench_questions"),
        (mvbench, "mvbench_action_count", "default"),
        MVBENCH,
    ),
]


@pytest.mark.parametrize(("reader", "theirs", "doc"), ASKED)
def test_questions_are_asked_as_in_lmms_eval(reader: Any, theirs: Any, doc: dict[str, Any]) -> None:
    (ask, name), (module, file, family) = reader, theirs
    their_text = getattr(module, f"{module.__name__.split('.')[-2]}_doc_to_text")
    assert ask(doc, ours(name)[family]) == their_text(doc, settings(module, f"{file}.yaml")[family])


def test_longvideobench_is_asked_with_the_options_that_it_has() -> None:
    text = utils.longvideobench_text(LONG, ours("longvideobench_questions")["default"])
    last = "Answer with the option's letter from the given choices directly.\n"
    assert text == f"What?\nA. a tree\nB. a car\n{last}"


Score = Callable[[str], Mapping[str, Any]]

SCORES: dict[str, Score] = {
    "videomme": lambda answer: utils.videomme_results({"answer": "B"}, [answer]),
    "mlvu": lambda answer: utils.mlvu_results({"answer": "B", "task_type": "ego"}, [answer]),
    "mvbench": lambda answer: utils.mvbench_results(MVBENCH | {"subtask": "x"}, [answer]),
    "longvideobench": lambda answer: utils.longvideobench_results(LONG, [answer]),
}


#: Answers to a question with the right option B, and their accuracy and whether they are unparsed.
SAID = [
    *(((answer, 1, 0)) for answer in ("B", "B.", "(B) green")),
    ("A", 0, 0),
    # The option that a sentence states is read.
    *((answer, 1, 0) for answer in ("The answer is (B).", "Best option: B", "b)")),
    ("A tree is drawn, so the answer is B.", 1, 0),
    # What states no option is unparsed, and nothing raises.
    *((answer, 0, 1) for answer in ("", " \n", "42", None, "Cannot tell", "a square", "Dunno")),
    *((answer, 0, 1) for answer in ("The image shows a square.", "A or B", "not B")),
]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("answer", "accuracy", "unparsed"), SAID)
def test_an_answer_is_worth_the_option_that_it_states(
    name: str, answer: Any, accuracy: float, unparsed: float
) -> None:
    scores = SCORES[name](answer)
    assert (scores["accuracy"], scores["unparsed"]) == (accuracy, unparsed)


def test_a_silent_model_gets_nothing_where_lmms_eval_leaves_it_out() -> None:
    """One right answer and two empty ones: a third, and by lmms-eval's own average all of it."""
    answers = ["(B) green", "", ""]
    docs = [MVBENCH | {"subtask": "one"}] * 3
    scores = [
        utils.mvbench_results(doc, [answer]) for doc, answer in zip(docs, answers, strict=True)
    ]
    assert utils.mean_of_kinds([result["average"] for result in scores]) == pytest.approx(1 / 3)
    theirs = [
        mvbench.mvbench_process_results(MVBENCH, [answer])["mvbench_accuracy"] for answer in answers
    ]
    assert mvbench.mvbench_aggregate_results(theirs) == 100


def test_the_mean_is_over_kinds_not_over_questions() -> None:
    results = [{"kind": "ego", "score": 1.0}] + [{"kind": "order", "score": 0.0}] * 3
    assert utils.mean_of_kinds(results) == 0.5


def test_m_avg_is_lmms_evals_where_all_kinds_are_there() -> None:
    kinds = ("anomaly_reco", "count", "ego", "needle", "order", "plotQA", "topic_reasoning")
    docs = [
        {"question": "?", "answer": "ABCD"[n % 4], "task_type": kind}
        for n, kind in enumerate((*kinds, "ego", "ego"))
    ]
    answers = ["A", "B", "A", "D", "", "B", "C", "D", "A"]
    mine = [
        utils.mlvu_results(doc, [answer])["m_avg"]
        for doc, answer in zip(docs, answers, strict=True)
    ]
    theirs = [
        mlvu.mlvu_process_results(doc, [answer])["mlvu_percetion_score"]
        for doc, answer in zip(docs, answers, strict=True)
    ]
    assert 100 * utils.mean_of_kinds(mine) == pytest.approx(mlvu.mlvu_aggregate_results_dev(theirs))


@pytest.mark.parametrize("name", ["videomme", "mvbench", "mlvu", "longvideobench"])
def test_a_headline_is_printed_in_percent(name: str) -> None:
    spec = commands.spec_of(f"benchmark={name}").benchmark
    assert (spec.reported[spec.headline].scale, spec.metrics[-1]) == (100, "unparsed")
