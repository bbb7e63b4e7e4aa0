"""Questions about videos: asked as lmms-eval asks them, and scored so that no answer is not a right one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import yaml
from lmms_eval.tasks.mlvu import utils as mlvu
from lmms_eval.tasks.mvbench import utils as mvbench
from lmms_eval.tasks.videomme import utils as videomme

from espalier.harness.paths import ROOT
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


@pytest.fixture(scope="module")
def utils() -> ModuleType:
    spec = importlib.util.spec_from_file_location("video_questions_utils", FOLDER / "utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Plain(yaml.SafeLoader):
    """Reads a task file and runs nothing of it."""


_Plain.add_multi_constructor("!", lambda loader, suffix, node: node.value)


def settings(module: ModuleType, name: str) -> dict[str, Any]:
    """Return the prompt settings of one of lmms-eval's task files."""
    folder = module.__file__
    assert folder is not None
    text = (ROOT / folder).with_name(name).read_text()
    return dict(yaml.load(text, _Plain)["lmms_eval_specific_kwargs"])


def ours(name: str) -> dict[str, Any]:
    text = (FOLDER / f"{name}.yaml").read_text()
    return dict(yaml.load(text, _Plain)["lmms_eval_specific_kwargs"])


@pytest.mark.parametrize("family", ["default", "llava_vid", "qwen3_vl"])
def test_video_mme_is_asked_as_in_lmms_eval(utils: ModuleType, family: str) -> None:
    theirs = settings(videomme, "videomme.yaml")[family]
    text = utils.videomme_text(VIDEOMME, ours("videomme_questions")[family])
    assert text == videomme.videomme_doc_to_text(VIDEOMME, theirs)


def test_mlvu_is_asked_as_in_lmms_eval(utils: ModuleType) -> None:
    theirs = settings(mlvu, "mlvu_dev.yaml")["default"]
    doc = {"question": "Which door?\n(A) Red\n(B) Green"}
    text = utils.mlvu_text(doc, ours("mlvu_questions")["default"])
    assert text == mlvu.mlvu_doc_to_text(doc, theirs)


def test_mvbench_is_asked_as_in_lmms_eval(utils: ModuleType) -> None:
    theirs = settings(mvbench, "mvbench_action_count.yaml")["default"]
    text = utils.mvbench_text(MVBENCH, ours("mvbench_questions")["default"])
    assert text == mvbench.mvbench_doc_to_text(MVBENCH, theirs)


def test_longvideobench_is_asked_with_the_options_that_it_has(utils: ModuleType) -> None:
    text = utils.longvideobench_text(LONG, ours("longvideobench_questions")["default"])
    last = "Answer with the option's letter from the given choices directly.\n"
    assert text == f"What?\nA. a tree\nB. a car\n{last}"


Score = Callable[[ModuleType, str], Mapping[str, Any]]

SCORES: dict[str, Score] = {
    "videomme": lambda utils, answer: utils.videomme_results({"answer": "B"}, [answer]),
    "mlvu": lambda utils, answer: utils.mlvu_results({"answer": "B", "task_type": "ego"}, [answer]),
    "mvbench": lambda utils, answer: utils.mvbench_results(MVBENCH | {"subtask": "x"}, [answer]),
    "longvideobench": lambda utils, answer: utils.longvideobench_results(LONG, [answer]),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    ("answer", "accuracy", "unparsed"),
    [
        ("B", 1, 0),
        ("B.", 1, 0),
        ("(B) green", 1, 0),
        ("A", 0, 0),
        ("", 0, 1),
        (" \n", 0, 1),
        ("42", 0, 1),
    ],
)
def test_an_answer_is_worth_its_letter(
    utils: ModuleType, name: str, answer: str, accuracy: float, unparsed: float
) -> None:
    scores = SCORES[name](utils, answer)
    assert (scores["accuracy"], scores["unparsed"]) == (accuracy, unparsed)


@pytest.mark.parametrize("name", SCORES)
def test_an_odd_answer_does_not_raise(utils: ModuleType, name: str) -> None:
    scores = SCORES[name](utils, None)  # type: ignore[arg-type]
    assert (scores["accuracy"], scores["unparsed"]) == (0, 1)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    "answer", ["The answer is (B).", "Best option: B", "A tree is drawn, so the answer is B.", "b)"]
)
def test_the_option_that_a_sentence_states_is_read(
    utils: ModuleType, name: str, answer: str
) -> None:
    scores = SCORES[name](utils, answer)
    assert (scores["accuracy"], scores["unparsed"]) == (1, 0)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    "answer", ["Cannot tell", "a square", "The image shows a square.", "Dunno", "A or B", "not B"]
)
def test_an_answer_that_states_no_option_is_unparsed(
    utils: ModuleType, name: str, answer: str
) -> None:
    scores = SCORES[name](utils, answer)
    assert (scores["accuracy"], scores["unparsed"]) == (0, 1)


def test_a_silent_model_gets_nothing_where_lmms_eval_leaves_it_out(utils: ModuleType) -> None:
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


def test_the_mean_is_over_kinds_not_over_questions(utils: ModuleType) -> None:
    results = [{"kind": "ego", "score": 1.0}] + [{"kind": "order", "score": 0.0}] * 3
    assert utils.mean_of_kinds(results) == 0.5


def test_m_avg_is_lmms_evals_where_all_kinds_are_there(utils: ModuleType) -> None:
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
    assert spec.reported[spec.headline].scale == 100
    assert spec.metrics[-1] == "unparsed"
