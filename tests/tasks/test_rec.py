"""Boxes in answers, by the format that a model was taught, and the samples of the RefCOCO family."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from espalier.harness.errors import UserError
from espalier.harness.evaluation.prompt_text import fill_box_settings, resizing
from espalier.harness.specs.run_spec import BOXES
from espalier.tasks.rec import task as referring
from espalier.tasks.rec.boxes import QUESTIONS, Resized, iou, parse, question, score, to_picture
from tests import commands

#: A picture of 640 x 480 and an object in it.
SIZE = (640, 480)
TRUTH = (64.0, 48.0, 320.0, 240.0)
#: That box in each format. The picture stands 80 rows below the top of its square. Qwen's processor makes it 644 x 476.
WRITTEN = {
    "unit": "[0.1, 0.1, 0.5, 0.5]",
    "square": "[0.1, 0.2, 0.5, 0.5]",
    "pixels": '```json\n[\n\t{"bbox_2d": [64, 48, 322, 238], "label": "the dog"}\n]\n```',
    "thousand": "(100,100),(500,500)",
    "tagged": "<ref>the dog</ref><box>[[100, 100, 500, 500]]</box>",
}
RESIZED = Resized(28, 56 * 56, 1280 * 28 * 28)
WRONG = {
    "unit": "[0.6, 0.6, 0.9, 0.9]",
    "square": "[0.6, 0.6, 0.9, 0.8]",
    "pixels": "[400, 300, 600, 400]",
    "thousand": "(600,600),(900,900)",
    "tagged": "[[600, 600, 900, 900]]",
}


def judge(answer: str, boxes: str, truth: tuple[float, ...] = TRUTH) -> dict[str, float]:
    return dict(score(answer, truth, boxes, SIZE, RESIZED))  # type: ignore[arg-type]


def test_every_format_has_a_question_and_an_example() -> None:
    assert set(QUESTIONS) == set(BOXES) == set(WRITTEN) == set(WRONG)
    assert question("tagged", "the {dog}").endswith("describes: <ref>the {dog}</ref>")


@pytest.mark.parametrize("boxes", BOXES)
def test_perfect_empty_and_wrong_answers(boxes: str) -> None:
    right = judge(WRITTEN[boxes], boxes)
    assert (right["acc_at_50"], right["mean_iou"]) == (1, pytest.approx(1, abs=0.02))
    assert right["unparsed"] == 0
    assert judge("", boxes) == {"acc_at_50": 0, "mean_iou": 0, "unparsed": 1}
    assert judge(WRONG[boxes], boxes) == {"acc_at_50": 0, "mean_iou": 0, "unparsed": 0}


#: 1000 x 600 at 28 pixels a token, at most 200 tokens: 18 x 10 of them, so 504 x 280 pixels.
SMALL = Resized(28, 4 * 28 * 28, 200 * 28 * 28)


@pytest.mark.parametrize(
    ("function", "arguments", "value"),
    [
        # 640 x 480 in a square of 640: 80 rows above the picture, none beside it; 480 x 640 the other way round.
        (to_picture, ((0.1, 0.2, 0.5, 0.5), "square", 640, 480), (64, 48, 320, 240)),
        (to_picture, ((0.2, 0.1, 0.5, 0.5), "square", 480, 640), (48, 64, 240, 320)),
        (to_picture, ((0, 0, 1, 1), "square", 100, 100), (0, 0, 100, 100)),
        # The same numbers as shares of the picture are another box.
        (to_picture, ((0.1, 0.2, 0.5, 0.5), "unit", 640, 480), (64, 96, 320, 240)),
        # In pixels of the picture that the model saw.
        (SMALL.size, (1000, 600), (504, 280)),
        (
            to_picture,
            ((50.4, 28, 252, 140), "pixels", 1000, 600, SMALL),
            (100, 60, 500, 300),
        ),
        (iou, ((0, 0, 2, 2), (1, 1, 3, 3)), 1 / 7),
        (iou, ((0, 0, 4, 2), (0, 0, 2, 2)), 0.5),
        (iou, ((0, 0, 1, 1), (1, 0, 2, 1)), 0),
        (iou, ((0, 0, 0, 0), (0, 0, 0, 0)), 0),
    ],
)
def test_boxes_by_hand(
    function: Callable[..., Any], arguments: tuple[Any, ...], value: Any
) -> None:
    assert function(*arguments) == pytest.approx(value)


@pytest.mark.parametrize(("bottom", "hit"), [(240.0, 1), (239.0, 0)])
def test_one_half_is_a_hit_and_a_hair_less_is_none(bottom: float, hit: int) -> None:
    assert judge("[0, 0, 1, 1]", "unit", (0.0, 0.0, 640.0, bottom))["acc_at_50"] == hit


@given(
    st.tuples(st.integers(30, 3000), st.integers(30, 3000)),
    st.tuples(*[st.floats(0, 1)] * 4),
)
def test_pixels_are_those_of_the_processor(size: tuple[int, int], share: tuple[float, ...]) -> None:
    width, height = size
    if max(size) / min(size) > 200:
        return
    rows, columns = smart_resize(height, width, 28, 200704, 1605632)
    seen = (share[0] * columns, share[1] * rows, share[2] * columns, share[3] * rows)
    box = to_picture(seen, "pixels", width, height, Resized(28, 200704, 1605632))
    wanted = (share[0] * width, share[1] * height, share[2] * width, share[3] * height)
    assert box == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "boxes", "hit", "unparsed"),
    [
        ("It is at [0.1, 0.1, 0.5, 0.5], I think.", "unit", 1, 0),
        ("[[0.1,0.1,0.5,0.5]]", "unit", 1, 0),
        ("[.1, .1, .5, .5]", "unit", 1, 0),
        ("(0.1, 0.1, 0.5, 0.5)", "unit", 1, 0),
        # Two boxes: the first counts.
        ("[0.1, 0.1, 0.5, 0.5] or [0.6, 0.6, 0.9, 0.9]", "unit", 1, 0),
        ("[0.6, 0.6, 0.9, 0.9] or [0.1, 0.1, 0.5, 0.5]", "unit", 0, 0),
        ("[0.5, 0.5, 0.1, 0.1]", "unit", 0, 0),
        ("[-0.2, -0.2, 1.3, 1.3]", "unit", 0, 0),
        ("[0.1, 0.1, 0.5]", "unit", 0, 1),
        ("[0.1, 0.1, 0.5, 0.5, 0.7]", "unit", 0, 1),
        ("0.1, 0.1, 0.5, 0.5", "unit", 0, 1),
        ("[nan, 0.1, 0.5, inf]", "unit", 0, 1),
        ("[100, 100, 500, 500]", "unit", 0, 1),
        ("the dog", "tagged", 0, 1),
        ("<box>[[100, 100, 500, 500]]", "tagged", 1, 0),
        ("<|object_ref_start|>dog<|object_ref_end|><|box_start|>(100,100),(500,500)<|box_end|>", "thousand", 1, 0),
        ("[64, 48, 322]", "pixels", 0, 1),
        ('{"bbox_2d": [64.0, 48.5, 322, 238]}', "pixels", 1, 0),
        ("[" + "9" * 4000 + ", 1, 1, 1]", "pixels", 0, 1),
    ],
)  # fmt: skip
def test_odd_answers(answer: str, boxes: str, hit: int, unparsed: int) -> None:
    scores = judge(answer, boxes)
    assert (scores["acc_at_50"], scores["unparsed"]) == (hit, unparsed)


@given(st.text(alphabet="[](),. -0123456789\nabx<>", max_size=200), st.sampled_from(BOXES))
def test_whatever_is_said_has_a_score(answer: str, boxes: str) -> None:
    scores = judge(answer, boxes)
    assert 0 <= scores["mean_iou"] <= 1
    assert scores["acc_at_50"] == float(scores["mean_iou"] >= 0.5)
    assert scores["unparsed"] == 0 or scores["mean_iou"] == 0


@given(st.lists(st.floats(-2000, 2000), min_size=4, max_size=4), st.text("abc \n", max_size=9))
def test_what_is_written_as_a_box_is_read_as_one(numbers: list[float], around: str) -> None:
    written = [f"{number:.3f}" for number in numbers]
    wanted = tuple(float(number) for number in written)
    assert parse(f"{around}[{', '.join(written)}]{around}") == wanted
    assert parse(f"{around}({written[0]},{written[1]}),({written[2]},{written[3]})") == wanted


@pytest.mark.parametrize("piece", ["[", "[1,", "[1 , 2 , 3 ", "(1,2),(", "1", " "])
def test_long_answers_are_read_in_time(piece: str) -> None:
    started = time.process_time()
    judge(piece * 50_000, "unit")
    assert time.process_time() - started < 5


def test_pictures_are_fetched_when_a_sample_is_read(tmp_path: Path) -> None:
    picture = tmp_path / "0.png"
    Image.new("RGB", (8, 6), "red").save(picture)
    rows = Dataset.from_dict({"image": [{"path": str(picture), "bytes": None}]})
    samples = Dataset.from_dict({"row": [0, 0], "expression": ["one", "two"]})
    read = referring.with_pictures(samples, rows)
    assert ([doc["expression"] for doc in read], read[1]["image"].size) == (["one", "two"], (8, 6))
    assert read.data.column_names == ["row", "expression"]
    assert referring.doc_to_visual(read[0])[0].getpixel((0, 0)) == (255, 0, 0)


def test_a_sample_without_picture_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"x\.jpg has no picture"):
        referring.doc_to_visual({"image": None, "file_name": "x.jpg"})


class FakeTask:
    def __init__(self) -> None:
        self.lmms_eval_specific_kwargs = {
            "boxes": "unit",
            "resized": None,
            "of_model": ["boxes", "resized"],
        }


@pytest.mark.parametrize(
    ("model", "boxes", "resized"),
    [
        ("llava15_13b", "square", None),
        ("qwen2_5_vl_3b", "pixels", (28, 200704, 1605632)),
        ("qwen2_vl_7b", "thousand", None),
        ("internvl2_5_8b", "tagged", None),
        ("llava_ov_7b", "unit", None),
    ],
)
def test_a_task_is_told_how_the_model_writes_boxes(
    model: str, boxes: str, resized: tuple[int, ...] | None
) -> None:
    spec, task = (
        commands.spec_of(f"model={model}", "benchmark=refcoco_val", "method=none"),
        FakeTask(),
    )
    fill_box_settings([task], spec.model, spec.benchmark)  # type: ignore[list-item]
    box_settings = task.lmms_eval_specific_kwargs
    assert (box_settings["boxes"], box_settings["resized"]) == (boxes, resized)
    assert referring.doc_to_text({"expression": "the dog"}, box_settings) == question(
        boxes, "the dog"
    )


def test_what_the_user_sets_of_the_prompt_stays() -> None:
    spec, task = (
        commands.spec_of(
            "model=llava15_7b",
            "benchmark=refcoco_val",
            "method=none",
            "+benchmark.prompt.boxes=unit",
        ),
        FakeTask(),
    )
    fill_box_settings([task], spec.model, spec.benchmark)  # type: ignore[list-item]
    assert task.lmms_eval_specific_kwargs["boxes"] == "unit"


def test_pixels_of_an_unknown_size_are_refused() -> None:
    spec = commands.spec_of("model=llava15_7b", "model.boxes=pixels", "method=none")
    with pytest.raises(
        UserError, match=r"model\.boxes='pixels' needs model\.processor\.min_pixels"
    ):
        resizing(spec.model)
