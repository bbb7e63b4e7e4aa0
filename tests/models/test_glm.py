"""GLM-4.1V to 4.6V: what differs from Qwen's classes, from which the family is derived."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Glm46VForConditionalGeneration

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.specs.generation import spoken
from espalier.methods.none import NoReduction
from tests.families.glm import GLM4V
from tests.families.qwen import IMAGES, MIXED, VIDEOS
from tests.family_runs import Tiny, answered, saved
from tests.tiny import chat, full_model, load_tiny, model_of


@pytest.mark.parametrize("value", [None, "strip", "off"])
def test_reasoning_is_turned_off_by_the_words_of_the_published_template(value: str | None) -> None:
    generation = {} if value is None else {"thinking": value}
    adapter = load_tiny(replace(GLM4V, generation=generation), saved("glm4v"))
    end = "/nothink<|assistant|>\n<think></think>\n" if value == "off" else "<|assistant|>\n"
    assert adapter.render(chat("Why?")) == f"[gMASK]<sop><|user|>\nWhy?{end}"
    assert adapter.answer_lead == ""


def test_marks_around_the_final_answer_are_left_out() -> None:
    adapter = Tiny("glm4v").adapter
    answer = "<think>A or B?</think><answer>It is <|begin_of_box|>B<|end_of_box|></answer>"
    (text,) = adapter.decode(torch.tensor([adapter.processor.tokenizer.encode(answer)]))
    assert (text, spoken(text)) == ("<think>A or B?</think>It is B", "It is B")


@pytest.mark.parametrize("name", ["glm4v", "glm4v_video", "glm4v_moe"])
def test_beams_see_the_pictures_of_a_prompt_in_their_order(name: str) -> None:
    """The class repeats two pictures as first, first, second, second."""
    tiny = Tiny(name)
    inputs = tiny.inputs()
    _, logits = answered(tiny.adapter, inputs)
    with Session(tiny.adapter, NoReduction(), Budget("kept", 0.0)) as session:
        beams = session.generate(inputs, max_new_tokens=1, num_beams=2, output_logits=True)
    assert (beams.logits[:, 0].view(3, -1, logits.shape[-1]) - logits[:, :1]).abs().max() < 1e-6


@pytest.mark.slow
def test_both_types_of_checkpoints_answer_alike(tmp_path: Path) -> None:
    folder = shutil.copytree(saved("glm4v"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "glm46v", "architectures": ["Glm46VForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    adapter = load_tiny(GLM4V, folder)
    assert isinstance(adapter.model, Glm46VForConditionalGeneration)
    _, expected = answered(Tiny("glm4v").adapter, Tiny("glm4v").inputs())
    assert torch.equal(answered(adapter, adapter.encode(IMAGES))[1], expected)


@pytest.mark.parametrize("chats", [MIXED[:1], (IMAGES[0], VIDEOS[0])])
def test_pictures_and_videos_in_one_batch_are_refused(chats: tuple[list[dict], ...]) -> None:
    with pytest.raises(UserError, match=r"pictures and videos in one batch: Glm4v.*batch_size=1"):
        Tiny("glm4v").adapter.encode(chats)


@pytest.mark.parametrize(
    ("file", "parameters", "buffers"),
    [
        ("glm41v_9b", 10_292_777_472, 0),
        ("glm46v_flash", 10_292_777_472, 0),
        # Of each router, the bias of its choice.
        ("glm45v", 107_710_933_120, 45 * 128),
        ("glm46v", 107_710_933_120, 45 * 128),
    ],
)
def test_config_files_build_as_many_parameters_as_the_releases_hold(
    file: str, parameters: int, buffers: int
) -> None:
    spec = model_of(f"model={file}", "model.weights=random")
    assert sum(item.numel() for item in full_model(spec).parameters()) + buffers == parameters
