"""Sides with a model spread over several devices, simulated on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model

from espalier.harness.decoding.speculative.drafts import (
    Draft,
    Greedy,
    RandomNumbers,
    Rule,
    Sampling,
)
from espalier.harness.decoding.speculative.state_machine import Machine
from espalier.harness.decoding.speculative.transports import SequentialTransport
from tests.decoding.elsewhere import Elsewhere, ending_elsewhere
from tests.decoding.models import LIMIT, NAMES, encoded, in_doubles, plain, side
from tests.families import FAMILIES
from tests.tiny import load_tiny, save_tiny

#: What makes a processor listen to the tokens before; Qwen2.5-VL's checkpoints come with the first.
LISTENING = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}


def test_the_second_device_is_one() -> None:
    there, here = torch.ones(3).as_subclass(Elsewhere), torch.ones(3)
    for mix in (lambda: there + here, lambda: torch.stack([here, there]), lambda: there[here > 0]):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    assert type(there.float() + 1) is Elsewhere
    assert type(there.to("cpu") + here) is torch.Tensor


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, LISTENING], ids=["deaf", "listening"])
def test_rows_of_a_spread_model_meet_on_its_first_device(name: str, settings: dict) -> None:
    expected = plain(name, **settings)
    with ending_elsewhere(in_doubles(name, "sdpa").model):
        target, draft = side(name, **settings), side(name, **settings)
        trace = Machine(draft, target, Greedy(), SequentialTransport(), 2).run(LIMIT)
        assert trace.tokens == expected
        assert draft.draft(expected[:2], 2).tokens == tuple(expected[2:4])
        tree = Draft((expected[1], 5, expected[2]), parents=(-1, -1, 0))
        assert target.rows(expected[:1], tree)[0] == expected[1]
        assert type(target.logits_after(expected[:2])) is torch.Tensor


def test_a_spread_model_samples() -> None:
    settings = {"do_sample": True, "temperature": 1.5, **LISTENING}
    rule: Rule = Sampling(RandomNumbers(3))

    def answer() -> list[int]:
        target, draft = (side("qwen2_5_vl", numbers=RandomNumbers(3), **settings) for _ in range(2))
        return Machine(draft, target, rule, SequentialTransport(), 2, True).run(LIMIT).tokens

    whole = answer()
    with ending_elsewhere(in_doubles("qwen2_5_vl", "sdpa").model):
        assert answer() == whole


def test_layers_that_are_fetched_from_disk_say_the_same(tmp_path: Path) -> None:
    """accelerate's hooks move what a layer takes and brings, as they do between GPUs."""
    spec = FAMILIES["llava"].spec
    adapter = load_tiny(spec, save_tiny(spec, tmp_path / "saved"))
    adapter.model.double()
    places = {"lm_head": "disk", "model.vision_tower": "cpu", "model.multi_modal_projector": "cpu"}
    for name, part in adapter.model.model.language_model.named_children():
        inside = f"model.language_model.{name}"
        places |= (
            {f"{inside}.{n}": "disk" if n % 2 else "cpu" for n in range(len(part))}
            if name == "layers"
            else {inside: "cpu"}
        )
    adapter.model = dispatch_model(
        adapter.model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    assert [device.type for device in adapter.devices] == ["cpu"]
    with torch.inference_mode():
        ids = adapter.model.generate(**encoded("llava"), max_new_tokens=LIMIT, do_sample=False)
    expected = ids[0, encoded("llava")["input_ids"].shape[1] :].tolist()
    target, draft = (side("llava", adapter=adapter) for _ in range(2))
    for overlap in (False, True):
        trace = Machine(draft, target, Greedy(), SequentialTransport(), 3, overlap).run(LIMIT)
        assert trace.tokens == expected
