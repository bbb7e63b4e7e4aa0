"""Gemma 3: renumbered positions and windows by hand, prompts, released names, FLOPs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import DynamicCache

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.flops import (
    head_flops,
    projector_flops,
    sample_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.gemma3 import Gemma3Adapter
from tests.families import FAMILIES
from tests.families.gemma3 import TYPES, WINDOW, sees
from tests.family_runs import (
    MOST,
    ROWS,
    Tiny,
    answered,
    extended,
    generated,
    generation,
    layers_given,
    saved,
)
from tests.tiny import Scatter, chat, load_tiny

TINY = Tiny("gemma3")


def rotary(places: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (1, L, 8) of positions (L,): a base for each type, full layers stretched by 8."""
    base, factor = (1e4, 1) if TYPES[layer] == "sliding_attention" else (1e6, 8)
    angle = places.float()[:, None] * (1 / base ** (torch.arange(4) / 4) / factor)
    angle = torch.cat([angle, angle], 1)[None]
    return angle.cos().double(), angle.sin().double()


@pytest.mark.sampled
@pytest.mark.parametrize("where", [("prefix",), (2,)])
@pytest.mark.parametrize("row", ROWS)
def test_renumbered_tokens_have_the_masks_and_tables_of_a_prompt_without_the_others(where, row):
    adapter, inputs = TINY.adapter, TINY.inputs(row)
    first = 0 if where == ("prefix",) else where[0]
    renumbered = generated(adapter, inputs, Scatter(where), MOST, positions="renumbered")
    longer = extended(inputs, renumbered.ids[:, :-1])
    length, visual = longer["input_ids"].shape[1], adapter.layout(inputs).visual[0]
    marked = torch.zeros(length, dtype=torch.bool).scatter(0, visual, True)
    dropped = torch.ones(len(visual), dtype=torch.bool)
    dropped[renumbered.records[0].origin] = False
    alive = torch.ones(length, dtype=torch.bool)
    alive[visual[dropped]] = False

    def by_hand(layer):
        mask, places = sees(marked, layer), torch.arange(length)
        if layer >= first:
            mask = torch.eye(length, dtype=torch.bool)
            kept = alive.nonzero()[:, 0]
            mask[kept[:, None], kept] = sees(marked[kept], layer)
            places = (alive.cumsum(0) - 1).clamp(min=0)
        return {"attention_mask": mask[None, None], "position_embeddings": rotary(places, layer)}

    with layers_given(adapter, by_hand), torch.inference_mode():
        logits = adapter.model(**longer, use_cache=False).logits
    assert (renumbered.logits - logits[:, inputs["input_ids"].shape[1] - 1 :]).abs().max() < 1e-6
    original = generated(adapter, inputs, Scatter(where), MOST)
    assert (renumbered.logits[:, 0] - original.logits[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("where", [("prefix",), (2,)])
def test_renumbered_dropping_equals_hiding(where):
    adapter, inputs = TINY.adapter, TINY.inputs()
    dropped, hidden = (
        generated(adapter, inputs, Scatter(where), MOST, backend=backend, positions="renumbered")
        for backend in ("drop", "emulate")
    )
    assert torch.equal(dropped.ids, hidden.ids)
    assert (dropped.logits - hidden.logits).abs().max() < 1e-9 * hidden.logits.abs().max()


LATER = [{"role": "assistant", "content": [{"type": "text", "text": " Two. "}]}, *chat("And now?")]
SYSTEM = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
USER, MODEL, END = "<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n"
PICTURE = "<start_of_image>"


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (chat(" w1 ", 0), f"{USER}{PICTURE}w1{END}"),
        (chat("w1", 0, 1), f"{USER}{2 * PICTURE}w1{END}"),
        (chat("a <image> b", 0), f"{USER}a {PICTURE} b{END}"),
        ([*chat("w1"), *LATER], f"{USER}w1{END}{MODEL}Two.{END}{USER}And now?{END}"),
        ([*SYSTEM, *chat("w1", 0)], f"{USER}Be brief.\n\n{PICTURE}w1{END}"),
    ],
)
def test_prompts_are_those_of_the_released_template(turns, text):
    adapter = TINY.adapter
    assert adapter.prompt_text(turns, adapter.load_media(turns)) == f"<bos>{text}{MODEL}"
    tokens = adapter.processor.tokenizer.decode(adapter.encode([turns])["input_ids"][0])
    picture = f"\n\n{PICTURE}{16 * '<image_soft_token>'}<end_of_image>\n\n"
    assert tokens == f"<bos>{text}{MODEL}".replace(PICTURE, picture)
    assert adapter.render([*SYSTEM, *chat("w1")]).count(USER) == 1


#: Names of the released files, and the library's.
RELEASED = {
    "language_model.model.": "model.language_model.",
    "vision_tower.vision_model.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def test_a_release_loads_under_its_own_names(tmp_path: Path):
    source = saved("gemma3")
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain = name
        for released, library_name in RELEASED.items():
            # The library writes what it has loaded under either name.
            if name.startswith(library_name):
                plain = released + name.removeprefix(library_name)
        tensors[plain] = tensor
    assert {name.split(".")[0] for name in tensors} == {part.split(".")[0] for part in RELEASED}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "gemma3"
    adapter = load_tiny(FAMILIES["gemma3"].spec, tmp_path)
    inputs = adapter.encode(list(FAMILIES["gemma3"].chats))
    assert torch.equal(answered(adapter, inputs)[1], answered(TINY.adapter, inputs)[1])


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_flops_are_those_that_torch_counts_and_pairs_those_of_the_masks(ratio):
    adapter = Tiny("gemma3", "float32", "eager").adapter
    facts = adapter.facts
    inputs = adapter.encode([FAMILIES["gemma3"].chats[1]])
    settings = {**generation(adapter, inputs), "max_new_tokens": 1}
    counter = FlopCounterMode(display=False)
    with Session(adapter, Scatter((2,)), Budget("kept", ratio)) as session, counter:
        record = session.generate(inputs, **settings).records[0]
    counted = counter.get_flop_counts()["Global"]
    assert counted.pop(torch.ops.aten.convolution) > 0
    before = tower_flops(facts, record.work) + projector_flops(facts, record.work.units)
    text = text_flops(facts, record.entering, record.text, causal=False)
    assert sum(counted.values()) == before + text + head_flops(facts)

    layout = adapter.layout(inputs)
    marked = torch.zeros(inputs["input_ids"].shape[1], dtype=torch.bool)
    marked[layout.visual[0]] = True
    full = [int(sees(marked, layer).sum()) for layer in range(len(TYPES))]
    assert list(record.full_pairs) == full
    if not ratio:
        assert list(record.pairs) == full
    else:
        alive = torch.ones(len(marked), dtype=torch.bool)
        alive[layout.visual[0]] = False
        alive[layout.visual[0][record.origin]] = True
        kept = [sees(marked, layer)[alive][:, alive] for layer in range(len(TYPES))]
        assert list(record.pairs) == [*full[:2], *(int(layer.sum()) for layer in kept[2:])]
    counts = record.entering, record.visual, record.text, record.work
    flops = sample_flops(facts, *counts, record.pairs, record.full_pairs)
    pair = 4 * facts.text.heads * facts.text.head_dim
    linear = text_flops(facts, record.entering, record.text, pairs=(0,))
    assert flops.exact.text == linear + pair * sum(record.pairs)


def test_a_sliding_layer_holds_its_window():
    adapter, inputs = TINY.adapter, TINY.inputs(0)
    batch = generated(adapter, inputs, Scatter(), MOST)
    record = batch.records[0]
    slides = [name == "sliding_attention" for name in TYPES]
    whole = record.entering[0] + record.text
    assert batch.cache_lengths == tuple(WINDOW - 1 if layer else whole for layer in slides)
    # The text after the picture is longer than the window.
    assert record.held == tuple(0 if layer else record.entering[0] for layer in slides)
    assert record.kv_entries == sum(record.held)


def test_a_loop_outside_the_engine_is_refused_after_dropping():
    with (
        Session(TINY.adapter, Scatter(), MOST) as session,
        pytest.raises(RuntimeError, match="needs the engine in every step"),
    ):
        session.prefill(TINY.inputs(0), DynamicCache())


def test_attention_without_masks_is_refused():
    spec = replace(FAMILIES["gemma3"].spec, attention="flash_attention_2")
    with pytest.raises(UserError, match="see one another, which needs a mask; valid: sdpa, eager"):
        Gemma3Adapter.check_settings(spec)
