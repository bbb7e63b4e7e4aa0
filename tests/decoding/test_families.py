"""Whole answers by speculative decoding for every model family: videos, several images, rotary axes, experts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculation import Speculation, with_chats
from espalier.harness.specs.run_spec import MethodSpec, ModelSpec, RunSpec
from espalier.methods.base import Decoder
from espalier.methods.onsd import OnSD
from espalier.methods.parallelvlm import ParallelVLM
from espalier.methods.specvlm_sd import SpecVLMSD
from espalier.methods.std import STD
from tests import commands
from tests.decoding.models import in_doubles
from tests.families import FAMILIES

LIMIT = 8

#: Speculative methods are refused where layers hold a window of the prompt, or one state.
NAMES = [
    name
    for name, family in FAMILIES.items()
    if not family.spec.facts.text.window_layers and family.spec.facts.text.linear is None
]

DECODERS: tuple[tuple[Decoder, float], ...] = (
    (ParallelVLM(gamma=2), 0.5),
    (SpecVLMSD(shape="tree"), 0.5),
    (STD(gamma=3), 0.5),
    (OnSD(gamma=2), 1.0),
)


@cache
def base() -> RunSpec:
    return commands.spec_of("method=parallelvlm", "engine.transport=sequential")


def run_of(model: ModelSpec, method: Decoder, ratio: float) -> RunSpec:
    draft = model if method.source == "model" else None
    return replace(
        base(),
        model=model,
        method=MethodSpec("decoder", draft=draft),
        budget=Budget("kept", ratio),
    )


@pytest.mark.slow
@pytest.mark.sampled(54)
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_the_targets(name: str) -> None:
    """The draft is the target's own model with fewer visual tokens."""
    adapter = in_doubles(name)
    chat = FAMILIES[name].chats[1]
    inputs = adapter.encode([chat])
    with torch.inference_mode():
        ids = adapter.model.generate(**inputs, max_new_tokens=LIMIT, do_sample=False)
    plain = ids[0, inputs["input_ids"].shape[1] :].tolist()
    visual = adapter.layout(inputs).counts[0]
    for method, ratio in DECODERS:
        with Speculation(run_of(adapter.spec, method, ratio), adapter, method) as both:
            generated = both.generate(
                adapter.to_device(with_chats(adapter, [chat])),
                ["0"],
                max_new_tokens=LIMIT,
                do_sample=False,
            )
        (record,) = generated.records
        decoded = DecodingRecord.from_entry(record.decoding)
        assert generated.ids[0].tolist() == plain, type(method).__name__
        assert decoded.mismatch is None
        assert record.visual == visual
        expected = 0 if ratio == 1 else int(visual / 2 + 0.5)
        assert decoded.draft_visual == expected
