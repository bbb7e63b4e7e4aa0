"""PACT against a slow version, by hand, on models, and against what its released code keeps and merges."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Need, Site, View
from espalier.methods.pact import PACT
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.released import numbers, released_view, shares
from tests.methods.twins import check_method, outcome, seeded

LAYER = Site("layer", 4)


def slow_pact(method: PACT, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """Token by token: the centres, and the mean of what comes to each."""
    keys = view.signals["next_visual_keys"][row].double().transpose(0, 1).flatten(1)
    units = normalize(keys, dim=1)
    far = (1 - units @ units.T).fill_diagonal_(0).tolist()
    every = range(len(far))
    length = view.tokens[row].double().norm(dim=1).tolist()
    score = [float(view.signals["next_mean_attention"][row, i]) * length[i] for i in every]
    n_left = max(keep, math.floor(method.keep * len(far) + 1e-9))
    left = sorted(sorted(every, key=lambda i: (-score[i], i))[:n_left])
    density = {i: sum(math.exp(-((far[i][j] / 2) ** 2)) for j in left) for i in left}
    order = sorted(left, key=lambda i: (-density[i], i))

    def greedy(cutoff: float) -> list[int]:
        centres: list[int] = []
        for i in order:
            if all(far[i][j] > cutoff for j in centres):
                centres.append(i)
        return centres[:keep]

    cutoff = method.cutoff
    if cutoff is None:
        low, high = 0, 201
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if len(greedy(middle / 100)) == keep else (low, middle)
        cutoff = low / 100
    centres = greedy(cutoff)
    centres += [i for i in order if i not in centres][: keep - len(centres)]
    into: dict[int, list[int]] = {centre: [centre] for centre in centres}
    for i in every:
        nearest = min(sorted(centres), key=lambda j: far[i][j])
        if i not in centres and far[i][nearest] <= method.coef_pruned * cutoff:
            into[nearest].append(i)
    return {centre: view.tokens[row, tokens].mean(dim=0) for centre, tokens in into.items()}


def test_six_tokens_by_hand() -> None:
    """Four of six are left: 0, 1 and 2 around one direction, and 3 at right angles to 0.

    Token 2 is the densest, since it is the nearest to 3. Token 4 comes back to it, and 5, opposite to all, does not.
    """
    turns = torch.tensor([0.0, 0.3, 0.6, math.pi / 2, 0.2, math.pi + 0.8])
    keys = torch.stack([turns.cos(), turns.sin()], dim=1)[None, None]
    tokens = torch.tensor([[[2.0, 0], [0, 1], [1, 0], [0, 4], [1, 1], [9, 9]]])
    attention = torch.tensor([[1.0, 2, 2, 1, 0.1, 0.01]])
    signals = {"next_mean_attention": attention, "next_visual_keys": keys}
    view = released_view(LAYER, tokens, 3, **signals)
    plan = PACT(keep=0.7, cutoff=0.2).plan(view, 2)
    assert plan.kept.tolist() == [[2, 3]]
    torch.testing.assert_close(outcome(view, plan)[0], torch.tensor([[1.0, 0.5], [0, 4]]))
    # 1 - cos(0.3) = 0.045: with less the others of the three are centres, too.
    assert PACT(keep=0.7, cutoff=0.04).plan(view, 4).kept.tolist() == [[0, 1, 2, 3]]
    # With more than all the distances the second centre is the second densest.
    assert PACT(keep=0.7, cutoff=2.0).plan(view, 2).kept.tolist() == [[1, 2]]


def released_pact(case: dict[str, Any]) -> View:
    seed, n_tokens = case["seed"], case["tokens"]
    keys = numbers(seed + 200, 2, n_tokens, 2) + 0.6 * numbers(seed + 100, 2, 1, 2)
    signals = {
        "next_mean_attention": shares(seed + 300, 1, n_tokens),
        "next_visual_keys": keys.unsqueeze(0),
    }
    return released_view(LAYER, numbers(seed, 1, n_tokens, 8), 16, **signals)


test_pact = check_method(
    "pact",
    slow_pact,
    settings=({}, {"keep": 0.9, "cutoff": 0.3}, {"keep": 0.2, "cutoff": 1.5}),
    views=seeded(),
    keeps=(1, 5, 14, 30, 47),
    released=released_pact,
)


def test_the_signals_are_those_of_the_layer_to_come() -> None:
    """Projected by hand from what enters the layer: keys from its own run, the mean query without rotation."""
    adapter, chats = adapter_of("llava"), FAMILIES["llava"].chats
    names = ("next_mean_attention", "text_states", "text_positions", "visual_positions")
    (first,) = shown(adapter, [Site("layer", 1)], map(Need, names), chats[:1], 0.5)
    attention = adapter.decoder.layers[1].self_attn
    norm = adapter.decoder.layers[1].input_layernorm
    n_before = int(
        (first.signals["text_positions"] < first.signals["visual_positions"].min()).sum()
    )
    words = first.signals["text_states"][:, :n_before]
    with torch.inference_mode():
        states = norm(torch.cat([words, first.tokens], dim=1))
        query = attention.q_proj(states).unflatten(2, (-1, attention.head_dim)).mean(dim=1)
        key = attention.k_proj(states).unflatten(2, (-1, attention.head_dim))
    heads = key.repeat_interleave(query.shape[1] // key.shape[2], dim=2)
    logits = torch.einsum("bhd,bkhd->bhk", query, heads) * attention.scaling
    expected = logits.softmax(-1).mean(1)[:, n_before:]
    torch.testing.assert_close(
        first.signals["next_mean_attention"], expected, atol=1e-6, rtol=0, check_dtype=False
    )
    (late,) = shown(adapter, [Site("layer", 2)], [Need("visual_keys")], chats[:1])
    (early,) = shown(adapter, [Site("layer", 1)], [Need("next_visual_keys")], chats[:1])
    torch.testing.assert_close(early.signals["next_visual_keys"], late.signals["visual_keys"])
