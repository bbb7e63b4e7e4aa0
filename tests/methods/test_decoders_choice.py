"""What the guided decoders give to the draft: the contract of `choose`, slow versions, by hand, planted signals."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.methods.base import Decoder, MethodError, Site, View
from espalier.methods.parallelvlm import Guidance, ParallelVLM
from espalier.methods.random import Random
from espalier.methods.specvlm_sd import SpecVLMSD
from espalier.methods.std import STD
from espalier.methods.uniform import Uniform
from espalier.methods.uvprune import UVPrune
from tests.methods.cases import DEPTH, generators_for, make_view, replaced, rows_of_view
from tests.methods.slow import two_stages
from tests.methods.test_uvprune import slow_uvprune
from tests.methods.twins import best, check_method, seeded

N_TOKENS = 48
READ = ("similarity_variation", "similarity", "attention_variation", "attention")
GUIDED: list[Decoder] = [
    SpecVLMSD(),
    SpecVLMSD(mass=0.8, shape="tree"),
    STD(),
    *(ParallelVLM(guidance=guidance) for guidance in (*READ, "random", "uniform")),
    ParallelVLM(L=4),
]
guided = pytest.mark.parametrize("decoder", GUIDED, ids=repr)
reading = pytest.mark.parametrize(
    "decoder", [d for d in GUIDED if d.needs(d.sites(DEPTH)[0])], ids=repr
)


# ---------------------------------------------------------------- the contract of `choose`


@guided
@pytest.mark.parametrize("keep", [1, N_TOKENS // 10, N_TOKENS])
def test_as_many_as_asked_in_order(decoder: Decoder, keep: int):
    chosen = decoder.choose(make_view(decoder), keep)
    shape = (3, DEPTH, keep) if decoder.source == "cache" else (3, keep)
    assert (chosen.shape, chosen.dtype) == (shape, torch.long)
    assert bool((chosen.diff(dim=-1) > 0).all())
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < N_TOKENS
    if keep == N_TOKENS:
        assert torch.equal(chosen, torch.arange(N_TOKENS).expand(shape))


@guided
def test_the_same_view_gives_the_same_choice_and_stays_as_it_was(decoder: Decoder):
    first, second = make_view(decoder), make_view(decoder)
    assert torch.equal(decoder.choose(first, 7), decoder.choose(second, 7))
    untouched = make_view(decoder)
    assert torch.equal(first.tokens, untouched.tokens)
    for key, value in first.signals.items():
        assert torch.equal(value, untouched.signals[key])


@guided
@pytest.mark.parametrize("keep", [4, 24])
def test_a_batch_is_its_rows_alone(decoder: Decoder, keep: int):
    view = make_view(decoder)
    together = decoder.choose(view, keep)
    for row in range(3):
        assert torch.equal(decoder.choose(rows_of_view(view, [row]), keep)[0], together[row])


@reading
def test_what_is_not_finite_is_refused(decoder: Decoder):
    view = make_view(decoder)
    for key in view.signals:
        if "positions" in key:
            continue
        bad = view.signals[key].clone()
        bad[1, -1, 5] = float("nan")
        with pytest.raises(MethodError, match="NaN or infinite"):
            decoder.choose(replaced(view, **{key: bad}), 7)


# ---------------------------------------------------------------- SpecVLM


def slow_specvlm_sd(method: SpecVLMSD, view: View, row: int, keep: int) -> list[int]:
    return two_stages(view, row, keep, range(DEPTH), method.mass)


def steep(method: SpecVLMSD, keep: int) -> View:
    view = make_view(method, seed=keep)
    return replaced(view, **{k: v**6 for k, v in view.signals.items() if "attention" in k})


test_specvlm_sd = check_method(
    "specvlm_sd",
    slow_specvlm_sd,
    settings=({"mass": 0.0}, {"mass": 0.4}, {"mass": 1.0}),
    views=steep,
    keeps=(1, 5, 11, 40, N_TOKENS),
)


def looked_at(decoder: Decoder, rows: Tensor) -> View:
    """One sample whose words pay the given attention (layers, N) in each layer."""
    grid = [((0, 0, 1, rows.shape[1]),)]
    view = make_view(decoder, grid, site=Site("layer", len(rows)))
    paid = {
        f"text_attention@{layer}": row.expand(1, 9, -1).clone() for layer, row in enumerate(rows)
    }
    return replaced(view, **paid)


def test_specvlm_of_sixty_tokens_by_hand():
    """A tenth of 60 is 6 (0.1 in binary is a little less), of which two cover 0.4 and four are spread."""
    keep = Budget("kept", 0.9).draft_keep(60)
    assert keep == 6
    rows = torch.full((2, 60), 0.5 / 58)
    # 0.3 and 0.2 of the whole in the mean over layers; neither layer alone has this order.
    rows[0, 10], rows[1, 10], rows[0, 40], rows[1, 40] = 0.1, 0.5, 0.4, 0.0
    chosen = SpecVLMSD().choose(looked_at(SpecVLMSD(), rows), keep)
    # The others are 58: of these the 1st, 20th, 39th and last, which are tokens 0, 20, 39 and 59.
    assert chosen.tolist() == [[0, 10, 20, 39, 40, 59]]


# ---------------------------------------------------------------- STD


def slow_std(_method: STD, view: View, row: int, keep: int) -> list[list[int]]:
    """Layer by layer, the entries by what the words pay them."""
    kept_indices = []
    for layer in range(DEPTH):
        paid = view.signals[f"text_attention@{layer}"][row].double()
        kept_indices.append(best([sum(map(float, paid[:, j])) for j in range(N_TOKENS)], keep))
    return kept_indices


test_std = check_method("std", slow_std, views=seeded(), keeps=(1, 5, 20))


def test_std_chooses_in_each_layer_by_hand():
    rows = torch.tensor([[0.1, 0.5, 0.2, 0.2], [0.3, 0.0, 0.0, 0.7], [0.25, 0.25, 0.25, 0.25]])
    assert STD().choose(looked_at(STD(), rows), 2).tolist() == [[[1, 2], [0, 3], [0, 1]]]


# ---------------------------------------------------------------- ParallelVLM


@pytest.mark.parametrize("guidance", READ)
def test_the_target_reads_what_it_would_prune_by_itself(guidance: Any):
    decoder = ParallelVLM(guidance=guidance, L=3)
    reducer = UVPrune(L=3, criterion=guidance)
    assert decoder.sites(DEPTH) == reducer.sites(DEPTH) == (Site("layer", 3),)
    (site,) = decoder.sites(DEPTH)
    assert decoder.needs(site) == reducer.needs(site)


test_parallelvlm = check_method(
    "parallelvlm",
    lambda method, *choice: slow_uvprune(UVPrune(L=method.L, criterion=method.guidance), *choice),
    settings=[{}, *({"guidance": guidance, "L": 3} for guidance in READ)],
    views=seeded(),
    keeps=(1, 4, 30),
)


def test_the_guidances_that_read_nothing():
    for guidance, reducer in (("random", Random()), ("uniform", Uniform())):
        decoder = ParallelVLM(guidance=guidance)  # type: ignore[arg-type]
        assert (decoder.sites(DEPTH), decoder.needs(Site("prefix"))) == ((Site("prefix"),), ())
        view = make_view(decoder)
        assert torch.equal(decoder.choose(view, 9), reducer.plan(make_view(decoder), 9).kept)
    # Chance is the sample's own, and nothing else's.
    by_chance = ParallelVLM(guidance="random")
    view = make_view(by_chance)
    other = View(view.site, view.tokens, view.grid, {}, generators_for([7, 8, 9]))
    assert not torch.equal(by_chance.choose(view, 9), by_chance.choose(other, 9))


def test_who_prunes_when_the_target_does_not():
    alone = ParallelVLM(guidance="self", L=4)
    assert alone.reducer == UVPrune(L=4)
    everything = ParallelVLM(guidance="none")
    blind = ParallelVLM(guidance="none", text_only=True)
    assert (everything.reducer, blind.reducer) == (None, None)
    assert (everything.text_only, blind.text_only) == (False, True)
    for decoder in (alone, everything, blind):
        assert not decoder.guided
        assert decoder.sites(DEPTH) == ()
    every = get_args(Guidance)
    assert {g for g in every if not ParallelVLM(guidance=g).guided} == {"none", "self"}
    assert {g for g in every if ParallelVLM(guidance=g).reducer} == {"self"}
