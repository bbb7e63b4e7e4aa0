"""Pictures that lose detail before the tower: against the imaging library, on every layout of pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.model_parts import coarse
from espalier.harness.engine.session import Session
from espalier.methods.base import MethodError
from espalier.methods.downsample import Downsample
from espalier.methods.uniform import Uniform
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.runs import kept_by


def test_a_picture_is_reduced_and_enlarged_as_the_imaging_library_does():
    noise = torch.rand(3, 40, 60, generator=torch.Generator().manual_seed(0))
    pictures = coarse(noise, 0.1)
    small, size = (19, 13), (60, 40)  # sqrt(0.1) of 60 and 40, rounded
    for channel, expected in zip(pictures, noise, strict=True):
        picture = Image.fromarray(expected.numpy()).resize(small, Image.Resampling.BICUBIC)
        enlarged = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
        assert np.abs(channel.numpy() - enlarged).max() < 1e-5


def test_constant_pictures_stay_and_a_share_of_one_changes_nothing_that_matters():
    flat = torch.full((2, 3, 9, 7), 0.3, dtype=torch.float64)
    assert torch.allclose(coarse(flat, 0.05), flat)
    noise = torch.rand(1, 3, 8, 8)
    assert torch.allclose(coarse(noise, 1.0), noise, atol=1e-6)
    assert coarse(noise.half(), 0.2).dtype == torch.float16


def test_an_edge_in_a_corner_of_a_single_pixel_share():
    assert coarse(torch.eye(4).expand(1, 3, 4, 4), 0.001).std() < 1e-6  # 1 x 1: one colour


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_vl", "qwen2_5_vl", "llava_onevision1_5"),
        *("paddleocr_vl", "hunyuan_ocr", "molmo2", "minicpm_v"),
    ],
)
def test_patches_are_put_together_as_pictures(name: str):
    """A ramp loses little, whichever way it runs; patches in a wrong order would lose nearly everything."""
    adapter = adapter_of(name)
    ramp = np.linspace(0, 255, 56, dtype=np.uint8)
    pixels = np.broadcast_to(ramp[None, :, None], (84, 56, 3)).copy()
    inputs = adapter.encode([replaced(FAMILIES[name].chats[0], Image.fromarray(pixels))])
    coarse = adapter.coarse_inputs(inputs, 0.25)
    change = (coarse["pixel_values"] - inputs["pixel_values"]).abs()
    assert change.max() < 0.1 * inputs["pixel_values"].std()
    assert coarse.keys() == inputs.keys()
    noisy = {**inputs, "pixel_values": torch.randn_like(inputs["pixel_values"])}
    assert adapter.coarse_inputs(noisy, 0.25)["pixel_values"].std() < 0.7


def replaced(chat: list[dict], picture: Image.Image) -> list[dict]:
    parts = [
        {**part, "image": picture} if part["type"] == "image" else part
        for part in chat[0]["content"]
    ]
    return [{**chat[0], "content": parts}, *chat[1:]]


@pytest.mark.parametrize("name", ["llava", "onevision_video"])
def test_a_run_equals_a_uniform_sample_of_coarse_pictures(name: str):
    adapter, chats = adapter_of(name), list(FAMILIES[name].chats)
    generated = kept_by(adapter, Downsample(), chats, 0.6)
    sampled = kept_by(adapter, Uniform(), chats, 0.6)
    coarse_run = run_on(adapter, adapter.coarse_inputs(adapter.encode(chats), 0.4))
    assert torch.equal(generated.logits, coarse_run)
    assert (generated.logits - sampled.logits).abs().max() > 1e-2
    assert [record.kept for record in generated.records] == [
        record.kept for record in sampled.records
    ]


def run_on(adapter, inputs) -> torch.Tensor:
    with Session(adapter, Uniform(), Budget("kept", 0.6)) as session:
        suppressed = list(adapter.items(inputs))
        settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True}
        return session.generate(inputs, None, suppress_tokens=suppressed, **settings).logits


def test_stored_prompts_are_refused():
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)
    with (
        Session(adapter, Downsample(), Budget("kept", 0.5)) as session,
        pytest.raises(MethodError, match=r"Downsample changes the pictures .*valid: the inputs"),
    ):
        session.prompt(adapter.encode(chats))
