"""Closed gaps between layers are exact: compared with full forwards, emulation, and single rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import DynamicCache

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.engine_guards import closes_gaps
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.methods.base import Site, View
from espalier.methods.pyramiddrop import PyramidDrop
from espalier.methods.sparsevlm import SparseVLM
from tests.engine.decode_oracle import forward
from tests.families import FAMILIES
from tests.family_runs import Tiny, adapter_of, extended, generation, plain, span
from tests.methods.runs import kept_by
from tests.tiny import DEPTH, Scatter

NAMES = ("llava", "llava_next", "onevision_video", "internvl", "internvl_phi3", "deepseek_ocr")
PLACES = [(2,), (1, 3), ("prefix", 2), ("vision", 1, 3)]
RELEASED = PyramidDrop(ranking="next_layer")


def run(name, method, chats, ratio=0.6, positions="renumbered", backend="drop", **changes):
    adapter = adapter_of(name)
    inputs = adapter.encode(list(chats))
    with Session(
        adapter, method, Budget("kept", ratio), positions=positions, backend=backend
    ) as session:
        return session.generate(inputs, None, **generation(adapter, inputs, **changes))


def living(adapter, inputs, method, counts):
    """Return the alive visual tokens of each layer, from the method's hash of coordinates."""
    (grid,) = adapter.layout(inputs).grid
    alive = [torch.arange(len(grid))] * DEPTH
    for site, count in zip(method.sites(DEPTH), counts, strict=True):
        kept = alive[-1]
        view = View(Site("prefix"), torch.zeros(1, len(kept), 0), grid[kept][None])
        kept = kept[method.plan(view, count).kept[0]]
        alive = [*alive[: site.layer], *[kept] * (DEPTH - site.layer)]
    return alive


@pytest.mark.sampled
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["llava", "onevision_video", "internvl"])
def test_every_layer_counts_its_own_tokens_while_reading_and_answering(name, where):
    """Compare with one full forward with explicit masks and positions: each layer's are those of its own tokens."""
    adapter, eager, method = adapter_of(name), adapter_of(name, attention="eager"), Scatter(where)
    sample_chat = FAMILIES[name].chats[1]
    inputs = adapter.encode([sample_chat])
    generated = run(name, method, [sample_chat])
    longer = extended(inputs, generated.ids[:, :-1])
    length, prompt = longer["input_ids"].shape[1], inputs["input_ids"].shape[1]
    visual = adapter.layout(inputs).visual[0]
    masks, places = [], []
    for alive in living(adapter, inputs, method, generated.records[0].kept):
        remaining = torch.ones(length, dtype=torch.bool)
        remaining[visual] = False
        remaining[visual[alive]] = True
        causal = torch.ones(length, length, dtype=torch.bool).tril() & remaining
        masks.append(causal | torch.eye(length, dtype=torch.bool))
        place = torch.zeros(length, dtype=torch.long)
        place[remaining] = torch.arange(int(remaining.sum()))
        places.append(place)
    assert not torch.equal(places[0], places[-1])
    expected = forward(eager, longer, masks, places).logits[:, prompt - 1 :]
    assert span(generated.logits - expected) < 2e-6 * span(expected)
    # The test is not vacuous: neither the positions of the first layer nor a correct prefill suffices.
    assert (
        span(generated.logits - run(name, method, [sample_chat], positions="original").logits)
        > 1e-3
    )
    first = forward(eager, longer, masks, [places[0]] * DEPTH).logits[:, prompt - 1 :]
    assert span(first - expected) > 1e-3


@pytest.mark.sampled(18)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_equals_its_rows_and_emulation(name, where):
    chats = FAMILIES[name].chats
    batch = run(name, Scatter(where), chats)
    slow = run(name, Scatter(where), chats, backend="emulate")
    assert torch.equal(batch.ids, slow.ids)
    assert span(batch.logits - slow.logits) < 1e-9 * span(slow.logits)
    assert span(batch.logits - run(name, Scatter(where), chats, positions="original").logits) > 1e-3
    for row, row_chat in enumerate(chats):
        single = run(name, Scatter(where), [row_chat])
        assert torch.equal(batch.ids[row], single.ids[0])
        assert span(batch.logits[row] - single.logits[0]) < 1e-6 * span(single.logits)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llava", "internvl"])
def test_beams(name):
    chats, beams = FAMILIES[name].chats, {"num_beams": 3, "output_logits": False}
    batch = run(name, Scatter((1, 3)), chats, **beams)
    assert torch.equal(batch.ids, run(name, Scatter((1, 3)), chats, backend="emulate", **beams).ids)
    for row, row_chat in enumerate(chats):
        assert torch.equal(batch.ids[row], run(name, Scatter((1, 3)), [row_chat], **beams).ids[0])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ratio_0_changes_no_bit(dtype):
    tiny = Tiny("llava", dtype)
    ids, logits = plain(tiny)
    for method in (Scatter((1, 3)), Scatter(("prefix", 2)), RELEASED):
        with Session(tiny.adapter, method, Budget("kept", 0.0), positions="renumbered") as session:
            inputs = tiny.inputs()
            generated = session.generate(inputs, None, **generation(tiny.adapter, inputs))
        assert torch.equal(generated.ids, ids)
        assert torch.equal(generated.logits, logits)


@pytest.mark.parametrize(
    "method", [RELEASED, SparseVLM(layers=(0, 2), depth=DEPTH, schedule=(9, 4))]
)
def test_method_does_what_the_release_does(method):
    """Its later stages also rank by closed gaps, as in the released code."""
    adapter, chats = adapter_of("llava"), FAMILIES["llava"].chats

    def logits(positions, backend="drop"):
        return kept_by(
            adapter, method, chats, 0.6, "abc", positions=positions, backend=backend
        ).logits

    followed = logits("method")
    assert torch.equal(followed, logits("renumbered"))
    assert span(followed - logits("method", "emulate")) < 1e-9 * span(followed)
    assert span(followed - logits("original")) > 1e-3


def test_positions_on_several_axes_stay():
    name, chats = "qwen2_5_vl", FAMILIES["qwen2_5_vl"].chats
    facts = adapter_of(name).facts
    assert not closes_gaps("method", RELEASED, facts)
    followed, kept = (
        run(name, RELEASED, chats, positions=policy) for policy in ("method", "original")
    )
    assert torch.equal(followed.logits, kept.logits)
    with pytest.raises(UserError, match=r"'renumbered' needs positions on one axis, .* has 3; val"):
        closes_gaps("renumbered", RELEASED, facts)
    assert closes_gaps("method", RELEASED, replace(facts, rotary_axes=1))


def test_a_decoding_loop_of_the_callers_own_is_refused():
    """The library cannot know that a token has a different position in every stage."""
    adapter = adapter_of("llava")
    inputs = adapter.encode([FAMILIES["llava"].chats[0]])

    def prefill(where, positions):
        method, budget = Scatter(where), Budget("kept", 0.6)
        with Session(adapter, method, budget, positions=positions) as session:
            return session.prefill(inputs, DynamicCache(config=adapter.decoder.config))

    with pytest.raises(RuntimeError, match="needs the engine in every step"):
        prefill((2,), "renumbered")
    _, following = prefill((2,), "original")
    _, sooner = prefill(("prefix",), "renumbered")
    assert int(following) == inputs["input_ids"].shape[1]
    assert int(sooner) < int(following)


@dataclass(frozen=True)
class Late(Scatter):
    """Drops nothing at its first site."""

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        return (1.0, share)


@pytest.mark.parametrize("where", [(1, 3), ("prefix", 2)])
def test_a_site_that_keeps_everything_closes_nothing(where):
    chats = FAMILIES["llava"].chats
    late = run("llava", Late(where), chats)
    assert torch.equal(late.logits, run("llava", Scatter(where[1:]), chats).logits)
