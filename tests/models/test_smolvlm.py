"""SmolVLM2: prompts as its processor's, units as pixel shuffle takes them, and the tiles of pictures."""

from __future__ import annotations

import pytest
import torch
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from espalier.harness.models.view_placement import PictureView
from tests.families import FAMILIES
from tests.family_runs import Tiny
from tests.tiny import IMAGE, chat, picture

TINY = Tiny("smolvlm")
LATER = [{"role": "assistant", "content": [{"type": "text", "text": "Two."}]}, *chat("And now?")]


@pytest.mark.parametrize(
    "turns", [*FAMILIES["smolvlm"].chats, chat("w1"), [*chat("w1", 0), *LATER]]
)
def test_prompts_are_those_of_the_library_s_template(turns: list[dict]) -> None:
    adapter = TINY.adapter
    expected = adapter.processor.tokenizer.apply_chat_template(
        turns, chat_template=DEFAULT_CHAT_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    ours = adapter.render(turns)
    # The template writes no blank before an answer of an earlier turn, where its model card does.
    assert ours.replace("Assistant:Two", "Assistant: Two") == expected


def test_units_average_the_patches_that_pixel_shuffle_joins() -> None:
    adapter = TINY.adapter
    patches = torch.rand(3, 16, 5)
    joined = adapter.model.model.connector.pixel_shuffle(patches, 2).view(-1, 4, 5).mean(1)
    assert torch.allclose(adapter.to_units(patches), joined)


def test_a_picture_s_views_are_its_tiles_then_the_whole() -> None:
    adapter = TINY.adapter
    inputs = adapter.encode([chat("w1"), chat("w2", picture(0, 56, 28), 1)])
    (items,) = adapter.items(inputs).values()
    # Enlarged to four tiles along the longer edge.
    assert [item.work.units for item in items] == [4 * (4 * 2 + 1), 4 * (4 * 4 + 1)]
    assert items[0].grid[:, 1].unique_consecutive().tolist() == [*range(1, 9), 0]
    box = adapter.view_box(PictureView((56, 28), 6, 2, 2, 8, False))
    assert (box.left, box.top, box.right, box.bottom) == (0.25, 0.5, 0.5, 1.0)
    assert adapter.pictures(inputs).pixels[0].shape == (9 + 17, 3, IMAGE, IMAGE)
