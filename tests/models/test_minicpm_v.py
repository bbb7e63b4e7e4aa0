"""MiniCPM-V 4.6: the library's answers, slices and their places, prompts, released sizes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import MiniCPMV4_6ForConditionalGeneration

from espalier.harness.errors import UserError
from espalier.harness.models.build_adapter import random_processor
from espalier.harness.models.families import ADAPTERS, family_of
from espalier.harness.models.view_placement import PictureView
from espalier.methods.none import NoReduction
from tests import commands
from tests.families import FAMILIES
from tests.family_runs import NONE, Tiny, generated, generation, plain, saved
from tests.linear_attention import in_doubles
from tests.tiny import chat, full_model, load_tiny, picture

TINY = Tiny("minicpm_v")


@pytest.mark.slow
def test_answers_are_those_of_the_librarys_class() -> None:
    """The adapter's class differs by the rows of the head alone; a caller's model is of the library's."""
    adapter, inputs = TINY.adapter, TINY.inputs()
    library = MiniCPMV4_6ForConditionalGeneration.from_pretrained(
        saved("minicpm_v"), dtype=torch.float64
    )
    library.generation_config = adapter.model.generation_config
    in_doubles(library.model.language_model)
    settings = {**generation(adapter, inputs), "return_dict_in_generate": True}
    output = library.eval().generate(**inputs, **settings)
    ids, logits = plain(TINY)
    assert torch.equal(output.sequences[:, inputs["input_ids"].shape[1] :], ids)
    expected = torch.stack(output.logits, 1)
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    owned = type(adapter)(library, adapter.processor, adapter.spec)
    loop = generated(owned, inputs, NoReduction(), NONE)
    assert torch.equal(loop.ids, ids)
    assert (loop.logits - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_slices_follow_the_whole_picture_in_raster_order() -> None:
    """Tokens of two pictures in one row, and of a picture with slices one above the other."""
    items = TINY.adapter.items(TINY.inputs())[TINY.adapter.model.config.image_token_id]
    shapes = [[(8, 16)], [(8, 16), (12, 12), (12, 12)], [(12, 12)], [(16, 8), (12, 12), (12, 12)]]
    first = 0
    for item, views in zip(items, shapes, strict=True):
        cells = [
            [0, view, row, column]
            for view, (rows, columns) in enumerate(views)
            for row in range(rows // 4)
            for column in range(columns // 4)
        ]
        assert (item.grid.tolist(), item.source.min()) == (cells, first)
        first += 4 * len(cells)
        assert item.source.max() == first - 1
    boxes = [
        TINY.adapter.view_box(PictureView(size, number, 3, 3, 2, True))
        for size, number in (((90, 200), 0), ((90, 200), 2), ((168, 84), 2))
    ]
    assert [(box.left, box.top, box.right, box.bottom) for box in boxes] == [
        (0.0, 0.0, 1.0, 1.0),
        (0.0, 0.5, 1.0, 1.0),
        (0.5, 0.0, 1.0, 1.0),
    ]


USER, END, ANSWER = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"
OFF, MARK = "<think>\n\n</think>\n\n", "<|image_pad|>"


@pytest.mark.parametrize(
    ("thinking", "lead"), [(None, OFF), ("off", OFF), ("budget:99", "<think>\n")]
)
def test_prompts_are_those_of_the_released_template(thinking: str | None, lead: str) -> None:
    spec = FAMILIES["minicpm_v"].spec
    adapter = load_tiny(replace(spec, generation={"thinking": thinking}), saved("minicpm_v"))
    parts = [*chat(" w1 ", 0, 1)[0]["content"], *chat("w2", 2)[0]["content"]]
    text = f"{USER}{MARK}\n{MARK}\n w1 \n{MARK}\nw2{END}{ANSWER}{lead}"
    assert adapter.render([{"role": "user", "content": parts}]) == text


def test_other_modes_and_videos_are_refused() -> None:
    adapter = load_tiny(FAMILIES["minicpm_v"].spec, saved("minicpm_v"))
    film = [{"role": "user", "content": [{"type": "video", "video": "film.mp4"}]}]
    with pytest.raises(UserError, match="video"):
        adapter.prepare([film])
    adapter.model.config.downsample_mode = "4x"
    with pytest.raises(UserError, match="downsample_mode=16x, 4x"):
        type(adapter)(adapter.model, adapter.processor, adapter.spec)


@pytest.mark.slow
def test_the_config_file_builds_as_many_parameters_as_the_hub_counts() -> None:
    spec = commands.spec_of("model=minicpm_v_4_6").model
    adapter = ADAPTERS.load(spec.adapter)
    assert family_of("minicpmv4_6") == spec.adapter
    assert sum(parameter.numel() for parameter in full_model(spec).parameters()) == 1_300_428_016
    images = random_processor(adapter, spec).image_processor
    for (width, height), tokens in (((640, 480), spec.facts.visual_tokens), ((2480, 3508), 574)):
        views = images([picture(0, width, height)], return_tensors="pt")["target_sizes"]
        assert views.prod(1).sum() == 16 * tokens
