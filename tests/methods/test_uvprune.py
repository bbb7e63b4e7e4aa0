"""UV-Prune against the paper's double sum, its signal against the model, and in the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch.nn.functional import cosine_similarity

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.methods.base import Need, Site, View
from espalier.methods.uvprune import Criterion, UVPrune
from tests.methods.cases import make_view, replaced
from tests.methods.engine import NAMES, check_method
from tests.methods.runs import adapter_of
from tests.methods.twins import check_slow
from tests.tiny import CHATS, Recorder

SQUARE = [((0, 0, 6, 8),)]


def between(tokens: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """All cosines (N, T)."""
    return cosine_similarity(tokens.double()[:, None], words.double()[None], dim=-1)


@pytest.mark.parametrize("keep", [1, 9, 30])
def test_two_layers_give_the_sum_over_all(keep: int):
    """Equation (3) over made-up states of six layers; the method is shown the first and the last."""
    generator = torch.Generator().manual_seed(keep)
    tokens = torch.randn(7, 48, 16, generator=generator)
    words = torch.randn(7, 9, 16, generator=generator)
    gain = sum(
        between(tokens[k], words[k]) - between(tokens[k - 1], words[k - 1]) for k in range(1, 7)
    )
    assert isinstance(gain, torch.Tensor)
    shown = {"projected": tokens[:1], "text_embeddings": words[:1], "text_states": words[6:]}
    view = replaced(make_view(UVPrune(), SQUARE), tokens[6:], **shown)
    wanted = gain.sum(1).topk(keep).indices.sort().values
    assert torch.equal(UVPrune().plan(view, keep).kept[0], wanted)


CRITERIA = get_args(Criterion)


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

    scores = [sum(worth(i, j) for j in range(n_words)) for i in range(n_tokens)]
    return sorted(range(n_tokens), key=lambda i: (-scores[i], i))[:keep]


@pytest.mark.parametrize("keep", [1, 9, 30, 48])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_each_criterion_equals_the_slow_one(criterion: Criterion, keep: int):
    method = UVPrune(criterion=criterion)
    check_slow(method, make_view(method, SQUARE * 3, seed=keep), slow_uvprune, (keep,))


def test_two_layers_of_attention_give_the_sum_over_all():
    """The step from layer to layer, summed over five of them, by the first and the last."""
    layers = torch.rand(5, 9, 48, generator=torch.Generator().manual_seed(4))
    gain = sum(layers[k] - layers[k - 1] for k in range(1, 5))
    assert isinstance(gain, torch.Tensor)
    method = UVPrune(criterion="attention_variation")
    shown = {"text_attention@0": layers[:1], "text_attention": layers[4:]}
    view = replaced(make_view(method, SQUARE), **shown)
    wanted = gain.sum(0).topk(12).indices.sort().values
    assert torch.equal(method.plan(view, 12).kept[0], wanted)


def test_variation_does_without_what_was_there_from_the_start():
    """Six tokens are looked at in every layer, six in the last alone: a criterion with variation wants the second."""
    sink, new = torch.zeros(1, 9, 48), torch.zeros(1, 9, 48)
    sink[..., :6], new[..., 20:26] = 0.5, 0.1
    view = make_view(UVPrune(criterion="attention_variation"), SQUARE)
    view = replaced(view, **{"text_attention@0": sink, "text_attention": sink + new})
    varying = UVPrune(criterion="attention_variation").plan(view, 6).kept[0]
    assert varying.tolist() == list(range(20, 26))
    assert UVPrune(criterion="attention").plan(view, 6).kept[0].tolist() == list(range(6))


def test_a_criterion_reads_no_more_than_it_needs():
    read = {
        criterion: UVPrune(criterion=criterion).needs(Site("layer", 5)) for criterion in CRITERIA
    }
    assert read["similarity"] == (Need("text_states"),)
    assert read["attention"] == (Need("text_attention"),)
    assert read["attention_variation"] == (Need("text_attention", 0), Need("text_attention"))
    assert read["similarity_variation"] == (
        *(Need("projected"), Need("text_embeddings")),
        Need("text_states"),
    )


def test_attention_needs_two_layers_to_vary():
    for depth, layer in ((80, 20), (20, 5), (6, 2), (3, 2)):
        assert UVPrune(criterion="attention_variation").sites(depth) == (Site("layer", layer),)


def test_rows_with_fewer_words_are_not_pulled_by_the_padding():
    view = make_view(UVPrune(), SQUARE)
    padded = {
        key: torch.cat([value, torch.zeros_like(value)], 1) if "text" in key else value
        for key, value in view.signals.items()
    }
    kept = UVPrune().plan(replace(view, signals=padded), 9).kept
    assert torch.equal(kept, UVPrune().plan(view, 9).kept)


def test_the_layer_is_the_papers_or_a_quarter_of_the_depth():
    for depth, layer in ((80, 20), (28, 20), (21, 20), (20, 5), (6, 1), (3, 1)):
        assert UVPrune().sites(depth) == (Site("layer", layer),)
    assert UVPrune(L=3).sites(6) == (Site("layer", 3),)


@pytest.mark.parametrize("layer", [1, 3])
def test_words_at_the_site_are_the_models_hidden_states(layer: int):
    recorder = Recorder((Site("layer", layer),), (Need("text_states"),))
    adapter = adapter_of("llava")
    inputs = adapter.encode(CHATS)
    with Session(adapter, recorder, Budget("kept", 0.0)) as session:
        session.generate(inputs, max_new_tokens=1, do_sample=False)
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        out = adapter.model(**inputs, position_ids=positions, output_hidden_states=True)
    words = mask.bool() & (inputs["input_ids"] != adapter.model.config.image_token_id)
    views = {view.tokens.shape[1]: view for view in recorder.views}
    for row, (n_tokens, place) in enumerate(((16, 0), (32, 0), (16, 1))):
        wanted = out.hidden_states[layer][row, words[row]]
        found = views[n_tokens].signals["text_states"][place]
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-9)
        assert not found[len(wanted) :].any()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_in_the_engine(name: str):
    check_method(name, UVPrune(L=2))


@pytest.mark.parametrize("criterion", ["similarity", "attention_variation", "attention"])
def test_the_other_criteria_in_the_engine(criterion: Criterion):
    check_method("llava_next", UVPrune(L=2, criterion=criterion))
