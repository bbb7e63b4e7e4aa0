"""Pictures stand where the question names them, in MMMU and in the interleaved tasks that share its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from espalier.harness.evaluation.evaluate import SampleErrors, evaluate_session, open_benchmark
from espalier.harness.evaluation.prompt_text import place_pictures
from espalier.harness.store import Store
from tests.benchmarks.answering import AnsweringModel
from tests.benchmarks.fixtures import choices
from tests.benchmarks.runs import SHELF, spec_of

PROMPT = "Answer with the option's letter from the given choices directly."
SETTINGS = {"multiple_choice_prompt": PROMPT, "open_ended_prompt": "", "prompt_type": "format"}

#: Question, options, and what the model reads; a number is a picture.
CASES = [
    (
        "<image 2> before <image 1>: which is larger?",
        ["first", "second"],
        [2, "before", 1, f": which is larger?\nA. first\nB. second\n\n{PROMPT}"],
    ),
    (
        "Is <image 1> like <image 1>?",
        ["yes", "no"],
        ["Is", 1, "like", 1, f"?\nA. yes\nB. no\n\n{PROMPT}"],
    ),
    (
        "Which?",
        ["<image 3>", "<image 1>", "<image 2> or <image 3>"],
        ["Which?\nA.", 3, "B.", 1, "C.", 2, "or", 3, PROMPT],
    ),
    ("Only <image 2>.", ["a", "b"], ["Only", 2, f".\nA. a\nB. b\n\n{PROMPT}"]),
    (
        "<image 1><image 2> <image 3>",
        ["a", "b"],
        [1, 2, 3, f"A. a\nB. b\n\n{PROMPT}"],
    ),
]


def picture(number: int) -> Image.Image:
    """Return a picture whose width is ten times its number."""
    return Image.new("RGB", (10 * number, 30))


def document(question: str, options: list[str], name: str = "image_{}") -> dict[str, Any]:
    return {
        "id": "validation_Math_1",
        "question": question,
        "options": str(options),
        "question_type": "multiple-choice",
        "answer": "A",
        **{name.format(number): picture(number) for number in (1, 2, 3)},
        **{name.format(number): None for number in (4, 5, 6, 7)},
    }


def parts_of(messages: list[dict[str, Any]]) -> list[Any]:
    (turn,) = messages
    return [
        part["text"] if part["type"] == "text" else part["url"].width // 10
        for part in turn["content"]
    ]


def placed(to_messages: Callable[..., Any], doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    task: Any = SimpleNamespace(doc_to_messages=to_messages)
    place_pictures([task])
    return list(task.doc_to_messages(doc))


@pytest.mark.sampled
@pytest.mark.parametrize(("question", "options", "read"), CASES)
@pytest.mark.parametrize("module", ["mmmu.utils", "mmmu.reasoning.utils"])
def test_each_mark_is_the_picture_of_its_name(
    module: str, question: str, options: list[str], read: list[Any]
) -> None:
    utils = import_module(f"lmms_eval.tasks.{module}")
    ask = partial(utils.mmmu_doc_to_messages, lmms_eval_specific_kwargs=SETTINGS)
    assert parts_of(placed(ask, document(question, options))) == read


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("Compare <image 1> with <image 2>.", ["a", "b"]),
        ("See <image 1>. Which?", ["<image 2>", "<image 3>"]),
        ("<image 1>", ["a", "b"]),
        ("No picture", ["a", "b"]),
    ],
)
def test_marks_in_sequence_give_the_prompt_of_lmms_eval(question: str, options: list[str]) -> None:
    utils = import_module("lmms_eval.tasks.mmmu.utils")
    ask = partial(utils.mmmu_doc_to_messages, lmms_eval_specific_kwargs=SETTINGS)
    doc = document(question, options)
    assert parts_of(placed(ask, doc)) == parts_of(ask(doc))


def test_a_task_that_names_pictures_in_its_text_is_left_alone() -> None:
    utils = import_module("lmms_eval.tasks.mmmu.utils")
    settings = {"format": "qwen3_vl", "pre_prompt": "Question: "}
    ask = partial(utils.mmmu_doc_to_messages, lmms_eval_specific_kwargs=settings)
    doc = document("<image 2> before <image 1>?", ["a", "b"])
    assert parts_of(placed(ask, doc)) == parts_of(ask(doc))


def numbered(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
    """EMMA's way: marks with an underscore, text without a picture after the last mark only if there is any."""
    marks = [number for number in (1, 2, 3) if f"<image_{number}>" in doc["query"]]
    texts = doc["query"]
    for number in marks:
        texts = texts.replace(f"<image_{number}>", "<image>")
    pieces = texts.split("<image>")
    content: list[dict[str, Any]] = []
    for number, piece in zip(marks, pieces, strict=False):
        content += [{"type": "text", "text": piece.strip()}] if piece.strip() else []
        content.append({"type": "image", "url": doc[f"image_{number}"]})
    return [{"role": "user", "content": [*content, {"type": "text", "text": pieces[-1].strip()}]}]


def test_marks_with_an_underscore_are_names_too() -> None:
    doc = document("", []) | {"query": "<image_3> over <image_1> and <image_3> again"}
    assert parts_of(placed(numbered, doc)) == [3, "over", 1, "and", 3, "again"]


def test_a_task_that_drops_words_between_marks_is_refused(tmp_path: Path) -> None:
    """SITE-Bench pairs marks without a name with a list of files."""
    utils = import_module("lmms_eval.tasks.sitebench.utils")
    doc = {
        "question": "Is <image> above <image> or <image>?",
        "options": ["yes", "no"],
        "visual": [str(tmp_path / "1.png")],
    }
    picture(1).save(doc["visual"][0])
    whole = doc | {"question": "Is it in <image>?"}
    assert parts_of(placed(utils.spatial_doc_to_messages_image, whole))[1] == 1
    with pytest.raises(ValueError, match=r"3 marks <image> and 1 pictures.*'above'"):
        placed(utils.spatial_doc_to_messages_image, doc)


def chats_of(tmp_path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    """What a model is asked of a data set of these rows, by sample."""
    columns = dict.fromkeys(("id", "question", "options", "question_type", "answer"), choices.TEXT)
    columns |= dict.fromkeys((f"image_{number}" for number in range(1, 8)), choices.PICTURE)
    data = tmp_path / "data"
    choices.write_repository(data, "lmms-lab-encoder/MMMU", "validation", columns, rows)
    spec = spec_of("mmmu", data, tmp_path / "store")
    loaded = open_benchmark(spec, shelf=SHELF)
    model = AnsweringModel(loaded.tasks, lambda doc: "A")
    evaluate_session(spec, model, Store(spec.store).run("0" * 16).journal, loaded=loaded)
    return model.chats


def test_mmmu_shows_pictures_by_name_through_a_run(tmp_path: Path) -> None:
    chats = chats_of(tmp_path, *(document(question, options) for question, options, _ in CASES[:3]))
    read = [
        [
            part["text"] if part["type"] == "text" else part["image"].width // 10
            for part in chat[0]["content"]
        ]
        for _, chat in sorted(chats.items())
    ]
    assert read == [case[2] for case in CASES[:3]]


def test_a_mark_without_a_picture_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SampleErrors, match="image_5") as error:
        chats_of(tmp_path, document("Is <image 1> like <image 5>?", ["yes", "no"]))
    assert "\n" not in str(error.value).strip()
