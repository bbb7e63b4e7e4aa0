"""UV-Prune against the paper's double sum, its signal against the model, and in the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from espalier.methods.base import Need, Site, View
from espalier.methods.uvprune import Criterion, UVPrune
from tests.family_runs import adapter_of, shown
from tests.methods.cases import make_view
from tests.methods.test_cdpruner import SQUARE
from tests.methods.twins import best, check_method, seeded
from tests.tiny import CHATS


def slow_uvprune(method: UVPrune, view: View, row: int, keep: int) -> list[int]:
    """Token by token and word by word, in plain Python."""
    criterion = method.criterion
    here = {key: value[row].double() for key, value in view.signals.items()}
    n_tokens, n_words = view.tokens.shape[1], 9

    def cosine(v: torch.Tensor, x: torch.Tensor) -> float:
        return float(v @ x) / math.sqrt(float(v @ v) * float(x @ x))

    def worth(i: int, j: int) -> float:
        if "attention" in criterion:
            paid = float(here["text_attention"][j, i])
            first = float(here["text_attention@0"][j, i]) if "variation" in criterion else 0.0
            return paid - first
        now = cosine(view.tokens[row, i].double(), here["text_states"][j])
        if criterion == "similarity":
            return now
        return now - cosine(here["projected"][i], here["text_embeddings"][j])

    return best([sum(worth(i, j) for j in range(n_words)) for i in range(n_tokens)], keep)


test_uvprune = check_method(
    "uvprune",
    slow_uvprune,
    settings=[{"criterion": criterion} for criterion in get_args(Criterion)],
    views=seeded(SQUARE * 3),
    keeps=(1, 9, 30, 48),
)


def test_rows_with_fewer_words_are_not_pulled_by_the_padding():
    view = make_view(UVPrune(), SQUARE)
    padded = {
        key: torch.cat([value, torch.zeros_like(value)], 1) if "text" in key else value
        for key, value in view.signals.items()
    }
    kept = UVPrune().plan(replace(view, signals=padded), 9).kept
    assert torch.equal(kept, UVPrune().plan(view, 9).kept)


@pytest.mark.parametrize("layer", [1, 3])
def test_words_at_the_site_are_the_models_hidden_states(layer: int):
    adapter = adapter_of("llava")
    inputs = adapter.encode(CHATS)
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        out = adapter.model(**inputs, position_ids=positions, output_hidden_states=True)
    words = mask.bool() & (inputs["input_ids"] != adapter.model.config.image_token_id)
    site_views = shown(adapter, [Site("layer", layer)], [Need("text_states")], CHATS)
    views = {view.tokens.shape[1]: view for view in site_views}
    for row, (n_tokens, place) in enumerate(((16, 0), (32, 0), (16, 1))):
        wanted = out.hidden_states[layer][row, words[row]]
        states = views[n_tokens].signals["text_states"][place]
        assert torch.allclose(states[: len(wanted)], wanted, atol=1e-9)
        assert not states[len(wanted) :].any()
