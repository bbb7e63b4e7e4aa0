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
from espalier.methods.base import MethodError, Need, Site, View
from espalier.methods.random import Random
from espalier.methods.uvprune import Criterion, UVPrune
from tests.methods.cases import generators_for, make_view, permuted, replaced
from tests.methods.engine import NAMES, check_method
from tests.methods.runs import adapter_of
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


def slow_scores(criterion: str, view: View, row: int) -> list[float]:
    """Token by token and word by word, in plain Python."""
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

    return [sum(worth(i, j) for j in range(n_words)) for i in range(n_tokens)]


@pytest.mark.parametrize("keep", [1, 9, 30, 48])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_each_criterion_equals_the_slow_one(criterion: Criterion, keep: int):
    method = UVPrune(criterion=criterion)
    view = make_view(method, SQUARE * 3, seed=keep)
    kept = method.plan(view, keep).kept
    for row in range(3):
        scores = slow_scores(criterion, view, row)
        best = sorted(range(48), key=lambda i: (-scores[i], i))[:keep]
        assert kept[row].tolist() == sorted(best)


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
    with pytest.raises(MethodError, match=r"method\.params\.L=1 .*valid: 2 or more"):
        UVPrune(L=1, criterion="attention_variation")
    with pytest.raises(MethodError, match=r"method\.params\.criterion='cosine' .*attention"):
        UVPrune(criterion="cosine")  # type: ignore[arg-type]


def test_rows_with_fewer_words_are_not_pulled_by_the_padding():
    view = make_view(UVPrune(), SQUARE)
    padded = {
        key: torch.cat([value, torch.zeros_like(value)], 1) if "text" in key else value
        for key, value in view.signals.items()
    }
    kept = UVPrune().plan(replace(view, signals=padded), 9).kept
    assert torch.equal(kept, UVPrune().plan(view, 9).kept)


def test_the_choice_follows_the_tokens():
    view = make_view(UVPrune(), SQUARE * 2)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    words = {key: value for key, value in view.signals.items() if "text" in key}
    moved = permuted(replace(view, signals={"projected": view.signals["projected"]}), order)
    moved = replace(moved, signals={**moved.signals, **words})
    kept = order[UVPrune().plan(moved, 11).kept].sort(dim=1).values
    assert torch.equal(kept, UVPrune().plan(view, 11).kept)


def recall(method, direction: float) -> float:
    """Share of six tokens kept that the layers moved along (or against) the words."""
    view = make_view(UVPrune(), SQUARE * 16)
    places = torch.rand(16, 48, generator=torch.Generator().manual_seed(3)).argsort(dim=1)[:, :6]
    signals = {**view.signals, "projected": view.tokens}
    signals["text_states"] = signals["text_embeddings"]
    tokens = view.tokens.clone()
    mean = signals["text_states"].mean(1, keepdim=True)
    tokens[torch.arange(16).unsqueeze(1), places] += direction * mean
    view = replace(view, tokens=tokens, signals=signals, generators=generators_for(range(16)))
    kept = method.plan(view, 9).kept
    return float((kept.unsqueeze(2) == places.unsqueeze(1)).any(dim=1).float().mean())


def test_what_moved_towards_the_words_is_kept_and_random_does_not_keep_it():
    floor = recall(Random(), 3.0)
    assert recall(UVPrune(), 3.0) > 0.95 > floor + 0.5
    assert recall(UVPrune(), -3.0) < floor  # the canary: what moved away goes first


def test_the_layer_is_the_papers_or_a_quarter_of_the_depth():
    for depth, layer in ((80, 20), (28, 20), (21, 20), (20, 5), (6, 1), (3, 1)):
        assert UVPrune().sites(depth) == (Site("layer", layer),)
    assert UVPrune(L=3).sites(6) == (Site("layer", 3),)
    with pytest.raises(MethodError, match=r"method\.params\.L=6 .*to 5 \(the model has 6 "):
        UVPrune(L=6).sites(6)
    with pytest.raises(MethodError, match=r"method\.params\.L=0 "):
        UVPrune(L=0)


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


@pytest.mark.parametrize("name", NAMES)
def test_in_the_engine(name: str):
    check_method(name, UVPrune(L=2))


@pytest.mark.parametrize("criterion", ["similarity", "attention_variation", "attention"])
def test_the_other_criteria_in_the_engine(criterion: Criterion):
    check_method("llava_next", UVPrune(L=2, criterion=criterion))
