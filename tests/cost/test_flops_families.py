"""FLOPs of every family's prefill compared exactly with torch's own counter on the loaded model, part by part."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.facts import Work
from espalier.harness.cost.flops import (
    head_flops,
    projector_flops,
    sample_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.session import Session
from espalier.methods.base import Need, Site, TokenReducer
from tests.families import FAMILIES
from tests.family_runs import NONE, ROWS, Tiny, calls_of
from tests.tiny import Recorder, Scatter

#: Cutting images into patches, SAM's neck and GLM's merging are convolutions, which the exact count leaves out, as it
#: does Molmo2's map of patches.
LEFT_OUT = {torch.ops.aten.convolution}
CLIP = ("llava", "llava_next")


class Meter:
    """Adds up the FLOPs that torch counts while some modules run."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self.counted: Counter[str] = Counter()
        self.counter = FlopCounterMode(display=False)

    def __enter__(self) -> Meter:
        self.handles = []
        for name, module in self.modules.items():
            self.handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self.add(name, -1)),
                module.register_forward_hook(lambda *_, name=name: self.add(name, 1)),
            ]
        self.counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.counter.__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def add(self, name: str, sign: int) -> None:
        counts = self.counter.get_flop_counts().get("Global", {})
        self.counted[name] += sign * sum(n for op, n in counts.items() if op not in LEFT_OUT)


def measured(
    tiny: Tiny, method: TokenReducer, row: int, ratio: float = 0.0
) -> tuple[dict[str, int], SampleRecord]:
    """Count one prefill of the loaded model; eager attention, since torch always sees its two products in full."""
    adapter = tiny.adapter
    parts = {"tower": adapter.tower, "projector": adapter.projector, "text": adapter.decoder}
    parts["head"] = adapter.model.get_output_embeddings()
    if isinstance(patches := getattr(adapter.tower, "patch_embedding", None), nn.Linear):
        parts["patches"] = patches
    stacked = {f"deepstack {layer}": merger for layer, merger in adapter.deepstack().items()}
    with (
        Session(adapter, method, Budget("kept", ratio)) as session,
        Meter({**parts, **stacked}) as meter,
    ):
        done = session.generate(tiny.inputs(row), max_new_tokens=1, do_sample=False)
    counts = dict(meter.counted)
    counts["projector"] += sum(counts.pop(name) for name in stacked)
    counts["tower"] -= counts.pop("patches", 0)
    if any(module is adapter.projector for module in adapter.tower.modules()):
        counts["tower"] -= counts["projector"]
    return counts, done.records[0]


def whole(work: Work) -> Work:
    """The work of views of n cells and n causal queries with masked pairs, which the kernel multiplies too.

    A view has 2 n tokens, and 2 n^2 + n (n + 1) / 2 of 4 n^2 pairs are not masked.
    """
    return work._replace(pairs=8 * (4 * work.pairs - work.tokens) // 20)


@pytest.mark.sampled(36)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_part_of_a_loaded_model_costs_what_torch_counts(name: str) -> None:
    tiny = Tiny(name, "float32", "eager")
    facts = tiny.adapter.facts
    for row in ROWS:
        counts, record = measured(tiny, Scatter((1,)), row, ratio=0.6)
        assert counts == {
            "tower": tower_flops(facts, whole(record.work) if facts.tower.causal else record.work),
            "projector": projector_flops(facts, record.work.units, pooled=record.work.pooled),
            # The kernel multiplies masked pairs too.
            "text": text_flops(facts, record.entering, record.text, causal=False),
            "head": head_flops(facts),
        }


@pytest.mark.parametrize("signal", ["cls_logits", "tower_states"])
@pytest.mark.parametrize("name", CLIP)
def test_the_layer_behind_the_one_that_is_read_runs_for_a_method_alone(
    name: str, signal: str
) -> None:
    """Its cost is the method's: the unreduced model does without."""
    tiny = Tiny(name, "float32")
    facts, unread = tiny.adapter.facts, tiny.adapter.unread_blocks()
    assert len(unread) == 1
    need = Need(signal, None if signal == "tower_states" else -1)
    with calls_of(unread[0].mlp) as calls:
        _, idle = measured(tiny, Scatter(("prefix",)), 1)
        assert not calls
        _, looked = measured(tiny, Recorder((Site("prefix"),), (need,)), 1)
        assert calls
    layer = tower_flops(facts, idle.work) // facts.tower.layers
    assert tower_flops(facts, looked.work) == tower_flops(facts, idle.work) + layer
    samples = [
        sample_flops(facts, record.entering, record.visual, record.text, record.work)
        for record in (idle, looked)
    ]
    assert samples[0].exact_full == samples[1].exact_full
    shares = [sample.exact.total / sample.exact_full.total for sample in samples]
    assert shares[0] == 1 < shares[1]


@pytest.mark.parametrize("name", CLIP)
def test_an_idle_layer_changes_no_feature_and_is_given_back(name: str) -> None:
    tiny = Tiny(name, "float32")
    adapter, inputs = tiny.adapter, tiny.inputs(*ROWS)
    with calls_of(adapter.projector) as calls:
        with torch.inference_mode():
            adapter.model.generate(**inputs, max_new_tokens=1, do_sample=False)
        with Session(adapter, Scatter(("prefix",)), NONE) as session:
            session.generate(inputs, max_new_tokens=1, do_sample=False)
    plain, ours = calls
    assert torch.equal(plain.args[0], ours.args[0])
    assert "forward" not in adapter.unread_blocks()[0].__dict__
