"""Attention visibility: three kinds compared with explicit pairs, on small tensors and in a non-causal stack."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.attention_probe import received_mean, word_rows
from espalier.harness.engine.layer_inputs import reference_mask
from espalier.harness.engine.layout import (
    Bidirectional,
    Causal,
    Visibility,
    VisualBlocks,
    visibility_of,
)
from espalier.harness.engine.session import Session
from espalier.harness.engine.signals.decoder_attention import received_max, rollout_of_words
from espalier.harness.errors import UserError
from espalier.methods.base import Need, Site
from tests.family_runs import shown
from tests.tiny import CHATS, Scatter, load_llava

SLOTS = 11
VALID = torch.ones(2, SLOTS, dtype=torch.bool)
VALID[1, :4] = False

#: Two pictures in the first row, one in the second, and gaps in the positions.
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1], [-1] * 6 + [0, 0, 0, -1, -1]])
POSITIONS = torch.tensor(
    [[0, 1, 2, 5, 6, 7, 9, 10, 11, 14, 15], [0, 0, 0, 0, 0, 1, 4, 5, 6, 9, 10]]
)
WINDOW = 6

WAYS = {
    "causal": Causal(),
    "bidirectional": Bidirectional(),
    "blocks": VisualBlocks(BLOCKS, POSITIONS),
    "window": VisualBlocks(BLOCKS, POSITIONS, WINDOW),
}


def sees(way: str, row: int, query: int, key: int) -> bool:
    """Return whether a query sees a key, one pair at a time."""
    if way == "bidirectional":
        return True
    if way in ("blocks", "window"):
        together = BLOCKS[row, key] == BLOCKS[row, query] >= 0
        near = POSITIONS[row, query] - POSITIONS[row, key] < WINDOW or way == "blocks"
        return bool((key <= query or together) and near)
    return key <= query


def pairs(way: str) -> Tensor:
    """Return (2, S, S): which valid keys each query sees."""
    visible = torch.zeros(2, SLOTS, SLOTS, dtype=torch.bool)
    for row in range(2):
        for query in range(SLOTS):
            for key in range(SLOTS):
                visible[row, query, key] = sees(way, row, query, key) and bool(VALID[row, key])
    return visible


@pytest.mark.parametrize("way", WAYS)
def test_pairs_and_their_counts(way: str) -> None:
    visibility: Visibility = WAYS[way]
    slots = torch.arange(SLOTS)
    wanted = pairs(way)
    seen_pairs = visibility.sees(slots, SLOTS) & VALID[:, None]
    assert torch.equal(seen_pairs, wanted)
    query_slots = torch.tensor([[10, 2, 5], [4, 9, 8]])
    seen_pairs = visibility.sees(query_slots, SLOTS) & VALID[:, None]
    assert torch.equal(seen_pairs, torch.stack([wanted[row, query_slots[row]] for row in range(2)]))
    counts = visibility.seen_by(VALID).expand(2, SLOTS)
    for row in range(2):
        for key in range(SLOTS):
            real = [q for q in range(SLOTS) if VALID[row, q] and sees(way, row, q, key)]
            assert counts[row, key] == max(len(real), 1)


def heads() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, SLOTS, 8, generator=generator, dtype=torch.float64)
    return query, torch.randn(2, 2, SLOTS, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("way", WAYS)
def test_every_probe_sees_what_the_stack_sees(way: str) -> None:
    """Maps of all heads, and their means, maxima and products, query by query."""
    visibility, (query, key) = WAYS[way], heads()
    logits = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    maps = logits.masked_fill(~pairs(way)[:, None], -1e30).softmax(-1)
    mean, largest = maps.mean(1), maps.amax(1)
    received = received_mean(query, key, 0.3, VALID, block=3, visibility=visibility)
    query_slots = torch.tensor([[2, 10, 5], [7, 9, -1]])
    rows = word_rows(query, key, 0.3, VALID, query_slots, block=2, visibility=visibility)
    tops = received_max(query, key, 0.3, VALID, query_slots, block=2, visibility=visibility)
    layers = [(query, key, 0.3), (query.flip(1), key, 0.3)]
    rolled = rollout_of_words(layers, VALID, query_slots, [visibility] * len(layers))
    logits = 0.3 * query.flip(1) @ key.repeat_interleave(2, 1).transpose(2, 3)
    second = logits.masked_fill(~pairs(way)[:, None], -1e30).softmax(-1).mean(1)
    identity = torch.eye(SLOTS, dtype=torch.float64)
    for row in range(2):
        real = [slot for slot in range(SLOTS) if VALID[row, slot]]
        for slot in real:
            paying = [q for q in real if sees(way, row, q, slot)]
            wanted = sum(float(mean[row, q, slot]) for q in paying) / len(paying)
            assert float(received[row, slot]) == pytest.approx(wanted, abs=1e-12)
        words = [word for word in query_slots[row].tolist() if word >= 0]
        torch.testing.assert_close(rows[row, : len(words)], mean[row, words])
        torch.testing.assert_close(tops[row], largest[row, words].mean(0))
        product = (0.5 * second[row] + 0.5 * identity) @ (0.5 * mean[row] + 0.5 * identity)
        torch.testing.assert_close(rolled[row, : len(words)], product[words])
    assert not rows[1, 2].any()
    assert not rolled[1, 2].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_of_new_tokens_written_out(way: str, attention: str) -> None:
    """Three new tokens behind eight cached ones; a query that may see nothing sees itself."""
    config, hidden = SimpleNamespace(_attn_implementation=attention), torch.zeros(2, 3, 4)
    mask = reference_mask(config, hidden, VALID, SLOTS - 3, WAYS[way])
    assert mask.shape == (2, 1, 3, SLOTS)
    open_ = mask if attention == "sdpa" else mask == 0
    diagonal = torch.eye(SLOTS, dtype=torch.bool)[-3:]
    assert torch.equal(open_[:, 0], pairs(way)[:, -3:] | diagonal)
    nothing = reference_mask(config, hidden, torch.zeros_like(VALID), SLOTS - 3, WAYS[way])
    open_ = nothing if attention == "sdpa" else nothing == 0
    assert torch.equal(open_[:, 0], diagonal.expand(2, -1, -1))


def test_a_back_end_without_masks_is_refused() -> None:
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    with pytest.raises(UserError, match=r"model\.attention='flash_attention_2'"):
        reference_mask(config, torch.zeros(1, 1, 4), VALID[:1, :1], 0)


def without_causality(adapter):
    """The same model with a text stack in which every token sees every other."""
    free = copy.copy(adapter)
    free.model = copy.deepcopy(adapter.model)
    free.decoder.config.is_causal = False
    return free


@pytest.fixture(scope="module")
def free(folder):
    return without_causality(load_llava(folder))


ONE = {"max_new_tokens": 1, "do_sample": False, "output_logits": True}


@pytest.mark.sampled
@pytest.mark.parametrize("where", [("prefix",), (2,), ("vision", 1, 3)])
@pytest.mark.parametrize("chats", [CHATS[:1], CHATS])
def test_dropping_equals_emulation_without_causality(free, where, chats) -> None:
    assert visibility_of(free.decoder.config) == Bidirectional()
    inputs = free.encode(chats)
    logits = {}
    for backend in ("drop", "emulate"):
        with Session(free, Scatter(where), Budget("kept", 0.5), backend=backend) as session:
            logits[backend] = session.generate(inputs, **ONE).logits
    assert (logits["drop"] - logits["emulate"]).abs().max() < 1e-10


def test_a_later_token_reaches_an_earlier_one(folder, free) -> None:
    """The test above is not vacuous: words after the image change its tokens."""
    for adapter, changed in ((load_llava(folder), False), (free, True)):
        shorter = [[{**CHATS[0][0], "content": CHATS[0][0]["content"][:-1]}]]
        views = [
            shown(adapter, [Site("layer", 2)], [], chats)[0].tokens
            for chats in (CHATS[:1], shorter)
        ]
        assert torch.allclose(*views, atol=1e-9) is not changed


def test_signals_equal_eager_maps_without_causality(folder, free) -> None:
    names = ("last_attention", "mean_attention", "text_attention", "visual_received_max")
    eager = without_causality(load_llava(folder, attention="eager"))
    for sample_chat in CHATS:
        (view,) = shown(free, [Site("layer", 2)], map(Need, names), [sample_chat])
        signals = view.signals
        inputs = eager.encode([sample_chat])
        layout = eager.layout(inputs)
        with torch.inference_mode():
            maps = eager.model(**inputs, output_attentions=True).attentions[1][0]
        visual, words = layout.visual[0], layout.words[0]
        assert maps[:, 0, -1].min() > 0  # the first token sees the last
        wanted = {
            "last_attention": maps.mean(0)[-1, visual],
            "mean_attention": maps.mean((0, 1))[visual],
            "text_attention": maps.mean(0)[words][:, visual],
            "visual_received_max": maps.amax(0)[visual][:, visual].mean(0),
        }
        for name in names:
            assert (signals[name][0] - wanted[name]).abs().max() < 1e-6
