"""FEATHER against a slow version, by hand, its signal on a model, and against what its released code keeps."""

from __future__ import annotations

from typing import Any

import torch

from espalier.methods.base import Need, Site, View
from espalier.methods.feather import Feather
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.released import released_view, shares
from tests.methods.twins import at_stage, check_kept, check_method

EARLY, LATE = Feather().sites(32)


def slow_feather(method: Feather, view: View, row: int, keep: int) -> list[int]:
    scores = view.signals["next_bare_attention"][row]
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
    if view.site.stage:
        return sorted(order[:keep])
    places = view.grid[row].tolist()
    grid = [i for i in order if all(place % method.stride == 0 for place in places[i][2:])]
    return sorted((grid + [i for i in order if i not in grid])[:keep])


def test_a_grid_and_the_best_of_the_others_by_hand():
    """Of 4 x 4 tokens, 0, 3, 12 and 15 are on the grid; it stays early, whatever it is worth, and counts late."""
    scores = torch.arange(16.0).flip(0).unsqueeze(0) / 16
    view = released_view(EARLY, torch.zeros(1, 16, 2), 4, next_bare_attention=scores)
    check_kept(view, (Feather(), 6, [0, 1, 2, 3, 12, 15]), (Feather(), 3, [0, 3, 12]))
    late = released_view(LATE, torch.zeros(1, 16, 2), 4, next_bare_attention=scores)
    assert Feather().plan(late, 3).kept.tolist() == [[0, 1, 2]]


def released_feather(case: dict[str, Any]) -> None:
    method, n_tokens, early = Feather(**case["params"]), case["tokens"], case["early"]
    tokens = torch.zeros(1, n_tokens, 2)
    scores = shares(case["seed"], 1, n_tokens) / 100  # its exponentials are at most 55
    view = released_view(EARLY, tokens, case["side"], next_bare_attention=scores)
    assert method.plan(view, len(early)).kept[0].tolist() == early
    rest = shares(case["seed"] + 100, 1, n_tokens)[:, early]
    late = released_view(LATE, tokens[:, early], case["side"], next_bare_attention=rest)
    assert [early[i] for i in method.plan(late, len(case["late"])).kept[0].tolist()] == case["late"]


test_feather = check_method(
    "feather",
    slow_feather,
    settings=({"stride": 1}, {"stride": 2}, {"stride": 3}),
    views=at_stage,
    varied=(0, 1),
    keeps=(1, 5, 20, 48),
    released=released_feather,
)


def test_the_signal_is_the_layers_attention_without_rotation_among_visual_tokens():
    """Projected by hand from the states that enter the layer; the second stage sees what the first left."""
    adapter, chats = adapter_of("llava"), FAMILIES["llava"].chats
    needs = (Need("next_bare_attention"), Need("text_states"))
    for ratio in (0.0, 0.5):
        for view in shown(adapter, (Site("layer", 1), Site("layer", 3)), needs, chats[:1], ratio):
            layer = adapter.decoder.layers[view.site.layer]
            attention, last = layer.self_attn, view.signals["text_states"][:, -1:]
            with torch.inference_mode():
                query, key = (
                    project(layer.input_layernorm(states)).unflatten(2, (-1, attention.head_dim))
                    for project, states in (
                        (attention.q_proj, last),
                        (attention.k_proj, view.tokens),
                    )
                )
            heads = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
            logits = torch.einsum("bqhd,bkhd->bhk", query, heads) * attention.scaling
            torch.testing.assert_close(
                view.signals["next_bare_attention"], logits.softmax(-1).mean(1), atol=1e-6, rtol=0
            )
