"""ToMe: its schedule, and a whole tower of merging against tokens in lists."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget, BudgetError
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.engine.session import Session
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import Assignment, MethodError, Site, View
from espalier.methods.tome import ToMe
from tests.families import FAMILIES
from tests.methods.cases import make_view, replaced
from tests.methods.runs import adapter_of, kept_by, watched
from tests.methods.towers import TOWERS, check_in_tower
from tests.methods.twins import outcome
from tests.tiny import model_of

SQUARE = [((0, 0, 12, 12),)]
VARIANTS = [ToMe(), ToMe(proportional=False, weighted=False)]
every_variant = pytest.mark.parametrize("method", VARIANTS, ids=["sizes", "plain"])


def facts_of(name: str) -> ModelFacts:
    return model_of(f"model={name}").facts


# ---------------------------------------------------------------- schedule


def test_every_block_is_a_site_and_the_decoder_has_none():
    assert ToMe().tower_sites(3) == (Site("tower", 0), Site("tower", 1), Site("tower", 2))
    assert ToMe().sites(32) == ()
    assert ToMe().positions(32) == "renumbered"


@pytest.mark.parametrize(("keep", "r"), [(192, 384 / 23), (128, 448 / 23), (64, 512 / 23)])
def test_the_published_counts_of_llava(keep: int, r: float):
    """23 blocks of CLIP run on 576 patches: r is 16.7, 19.5 and 22.3 on average, rounded up or down in each block."""
    kept = Budget("kept", 1 - keep / 576).keep(ToMe(), facts_of("llava15_7b"), 576, 32)
    assert len(kept) == 23
    assert kept[-1] == keep
    merged = [before - after for before, after in pairwise((576, *kept))]
    assert sum(merged) / 23 == pytest.approx(r)
    assert max(merged) - min(merged) == 1
    # The number merged up to any block is the nearest integer to the straight line.
    assert all(abs(576 - count - r * (n + 1)) <= 0.5 for n, count in enumerate(kept))


def test_where_the_same_number_is_more_than_half_a_block_halves():
    shares = ToMe().fractions(0.01, 23)
    assert shares[-4:] == pytest.approx((0.08, 0.04, 0.02, 0.01))
    steps = [a - b for a, b in pairwise((1, *shares))]
    assert steps[:17] == pytest.approx([0.99 / 23] * 17)
    assert ToMe().fractions(0.2, 3) == pytest.approx((1 - 0.8 / 3, 0.4, 0.2))
    assert ToMe().fractions(0.125, 3) == pytest.approx((0.5, 0.25, 0.125))


@pytest.mark.parametrize("blocks", [1, 2, 3, 24])
def test_no_block_ever_merges_more_than_half(blocks: int):
    shares = [1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.01, 1e-6, 2.0**-200]
    schedules = [ToMe().fractions(share, blocks) for share in shares]
    assert schedules[0] == (1,) * blocks
    for share, schedule in zip(shares, schedules, strict=True):
        assert schedule[-1] == max(share, 0.5**blocks)
        for before, after in pairwise((1, *schedule)):
            assert before / 2 * (1 - 1e-9) <= after <= before
    for higher, lower in pairwise(schedules):
        assert all(a >= b for a, b in zip(higher, lower, strict=True))


@pytest.mark.parametrize("n_tokens", [5, 7, 9, 144, 577])
def test_integers_keep_to_the_half(n_tokens: int):
    """Rounding never asks a block for more than the tokens at even places."""
    facts = facts_of("llava15_7b")
    for keep in range(1, n_tokens + 1):
        budget = Budget("kept", 1 - keep / n_tokens)
        for before, after in pairwise(
            (n_tokens, *budget.keep(ToMe(), facts, n_tokens, 32)),
        ):
            assert before // 2 <= after <= before


def test_what_the_blocks_cannot_reach_is_refused():
    """The embedded model's tower runs three blocks: an eighth is left at least."""
    facts = facts_of("seedling")
    assert Budget("kept", 0.87).keep(ToMe(), facts, 144, 8)[-1] == 19
    with pytest.raises(BudgetError, match=r"ratio=0\.9 cannot be met .* 0 <= ratio < 0\.875"):
        Budget("kept", 0.9).keep(ToMe(), facts, 144, 8)


# ---------------------------------------------------------------- merging


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def slow_block(
    tokens: list[Tensor], sizes: list[float], keys: list[Tensor], keep: int, weighted: bool
) -> tuple[list[Tensor], list[float], list[int]]:
    """One block of the paper: the tokens, sizes and places that are left."""
    pairs = []
    for a in range(0, len(tokens), 2):
        partners = range(1, len(tokens), 2)
        b = max(partners, key=lambda place: (cosine(keys[a], keys[place]), -place))
        pairs.append((cosine(keys[a], keys[b]), a, b))
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))
    members = {place: [place] for place in range(len(tokens))}
    for _, a, b in pairs[: len(tokens) - keep]:
        members[b].append(a)
        del members[a]
    places = sorted(members)
    merged = []
    for place in places:
        weight = {j: sizes[j] if weighted else 1.0 for j in members[place]}
        total = sum(weight.values())
        merged.append(sum(weight[j] * tokens[j] for j in weight) / total)
    return merged, [sum(sizes[j] for j in members[place]) for place in places], places


@every_variant
@pytest.mark.parametrize("keep", [20, 50, 100, 130])
def test_a_tower_of_three_blocks_equals_the_slow_one(method: ToMe, keep: int):
    """Each block sees what the last one left, by its own keys; sizes add up."""
    view = make_view(method, SQUARE * 2, seed=keep)
    generator = torch.Generator().manual_seed(keep)
    sizes = torch.ones(2, 144)
    slow = [(list(row), [1.0] * 144) for row in view.tokens.double()]
    counts = [round(144 * share) for share in method.fractions(keep / 144, 3)]
    for block, count in enumerate(counts):
        keys = torch.randn(*view.tokens.shape[:2], 16, generator=generator)
        signals = {"block_keys": keys, "sizes": sizes}
        view = replace(
            view,
            site=Site("tower", block),
            signals={need.key: signals[need.key] for need in method.needs(Site("tower", block))},
        )
        plan = method.plan(view, count)
        plan.check(view.tokens.shape[1], count)
        assert plan.merge is not None
        merged = plan.merge.apply(view.tokens, count)
        summed = Assignment(plan.merge.slot, torch.ones_like(sizes))
        for row in range(2):
            tokens, own, places = slow_block(
                *slow[row], list(keys[row].double()), count, method.weighted
            )
            slow[row] = tokens, own
            assert plan.kept[row].tolist() == places
            assert torch.allclose(merged[row].double(), torch.stack(tokens), atol=1e-5)
        sizes = summed.apply(sizes.unsqueeze(-1), count).squeeze(-1)
        assert sizes.tolist() == [own for _, own in slow]
        view = replace(
            view, tokens=merged, grid=view.grid.gather(1, plan.kept[..., None].expand(-1, -1, 4))
        )
    assert sizes.sum(dim=1).tolist() == [144, 144]


def by_hand(method: ToMe, keep: int, sizes: list[float]) -> tuple[list[int], list[float]]:
    """Five patches; 0 and 4 have the key of 1, 2 has that of 3 but for a little."""
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.1, 1.0], [0.0, 3.0], [5.0, 0.0]]])
    tokens = torch.tensor([[[1.0], [10.0], [100.0], [1000.0], [10000.0]]])
    view = View(
        Site("tower"),
        tokens,
        torch.zeros(1, 5, 4, dtype=torch.long),
        {"block_keys": keys, "sizes": torch.tensor([sizes])},
    )
    plan = method.plan(view, keep)
    return plan.kept[0].tolist(), outcome(view, plan)[0, :, 0].tolist()


def test_a_small_case_by_hand():
    kept, merged = by_hand(ToMe(), 4, [1, 1, 1, 1, 1])
    assert kept == [1, 2, 3, 4]  # 0 and 4 tie: the lower goes
    assert merged == pytest.approx([5.5, 100, 1000, 10000])
    kept, merged = by_hand(ToMe(), 3, [3, 1, 1, 1, 4])
    assert kept == [1, 2, 3]
    assert merged == pytest.approx([(3 * 1 + 10 + 4 * 10000) / 8, 100, 1000])
    kept, merged = by_hand(ToMe(weighted=False), 3, [3, 1, 1, 1, 4])
    assert kept == [1, 2, 3]
    assert merged == pytest.approx([10011 / 3, 100, 1000])


def test_more_than_half_goes_in_rounds():
    """Two of five at most: 0 and 4 go to 1. Of what is left, 1, 2 and 3, only 2 can be joined; 3 is nearer to it."""
    kept, merged = by_hand(ToMe(), 2, [3, 1, 1, 1, 4])
    assert kept == [1, 2]
    assert merged == pytest.approx([(3 * 1 + 10 + 4 * 10000) / 8, 550])


def test_the_weighted_sum_of_all_tokens_stays_as_it_is():
    view = make_view(ToMe(), SQUARE)
    for keep in (1, 30, 100):
        plan = ToMe().plan(view, keep)
        assert plan.merge is not None
        merged = plan.merge.apply(view.tokens, keep)
        sizes = view.signals["sizes"].unsqueeze(-1)
        left = Assignment(plan.merge.slot, torch.ones(1, 144)).apply(sizes, keep)
        assert torch.allclose((left * merged).sum(1), (sizes * view.tokens).sum(1), atol=1e-3)


def test_what_nothing_joins_is_untouched_to_the_bit():
    view = make_view(ToMe(), SQUARE)
    plan = ToMe().plan(view, 120)
    assert isinstance(plan.merge, Assignment)
    alone = plan.merge.slot[0].bincount() == 1
    assert alone.sum() > 80
    merged = plan.merge.apply(view.tokens, 120)
    assert torch.equal(merged[0, alone], view.tokens[0, plan.kept[0, alone]])


def test_sizes_are_asked_for_only_if_they_weigh():
    names = {need.key for need in ToMe(weighted=False).needs(Site("tower"))}
    assert names == {"block_keys"}
    assert ToMe().proportional is True
    assert ToMe(proportional=False).proportional is False


@pytest.mark.parametrize("method", [ToMe(), ToMe(weighted=False)])
def test_identical_keys_merge_the_first(method: ToMe):
    view = make_view(method, SQUARE)
    signals = {key: torch.ones_like(value) for key, value in view.signals.items()}
    signals["block_keys"] = torch.eye(1, 16).expand(1, 144, 16)
    plan = method.plan(replaced(view, **signals), 140)
    assert sorted(set(range(144)) - set(plan.kept[0].tolist())) == [0, 2, 4, 6]
    assert isinstance(plan.merge, Assignment)
    assert plan.merge.slot[0, :8].tolist() == [0, 0, 0, 1, 0, 2, 0, 3]  # all into place 1


def planted_recall(turned: float) -> float:
    """Share of 12 planted twins that merge among the 12 pairs of 144 tokens, over 16 pictures; -1 turns one round."""
    view = make_view(ToMe(), SQUARE * 16)
    generator = torch.Generator().manual_seed(3)
    keys = view.signals["block_keys"].clone()
    first = 2 * torch.rand(16, 72, generator=generator).argsort(dim=1)[:, :12]
    rows = torch.arange(16).unsqueeze(1)
    noise = 0.01 * torch.randn(16, 12, 16, generator=generator)
    keys[rows, first] = turned * keys[rows, first + 1] + noise
    plan = ToMe().plan(replaced(view, block_keys=keys), 132)
    stays = torch.zeros(16, 144, dtype=torch.bool).scatter_(1, plan.kept, True)
    return 1 - float(stays[rows, first].float().mean())


def test_twins_merge_first():
    assert planted_recall(1.0) == 1
    # The canary: a cosine turned upside down would send the opposites together; 12 of 72 is chance.
    assert planted_recall(-1.0) < 12 / 72 + 0.1


def test_values_that_are_not_finite_are_refused():
    view = make_view(ToMe(), SQUARE)
    for name in ("block_keys", "sizes"):
        bad = view.signals[name].clone()
        bad.view(-1)[5] = float("nan")
        with pytest.raises(MethodError, match="NaN or infinite"):
            ToMe().plan(replaced(view, **{name: bad}), 100)


# ---------------------------------------------------------------- engine


@pytest.mark.sampled(3)
@every_variant
@pytest.mark.parametrize("name", TOWERS)
def test_on_models(name: str, method: ToMe):
    check_in_tower(name, method)


def tower_by_hand(
    adapter: Adapter, inputs: dict, counts: list[int], method: ToMe
) -> list[Tensor | None]:
    """What one picture's tokens become in a CLIP tower, in plain products and lists; None where a patch is gone."""
    tower = adapter.tower
    hidden = tower.pre_layrnorm(tower.embeddings(inputs["pixel_values"]))[0]
    first, tokens = hidden[0], list(hidden[1:])
    places, sizes = list(range(len(tokens))), [1.0] * len(tokens)
    for layer, keep in zip(tower.encoder.layers, counts, strict=False):
        attention = layer.self_attn
        whole = torch.stack([first, *tokens])
        states = layer.layer_norm1(whole)
        query, key, value = (
            part(states).unflatten(1, (attention.num_heads, -1)).transpose(0, 1)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        logits = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        if method.proportional:
            logits = logits + torch.tensor([1.0, *sizes]).log()
        whole = whole + attention.out_proj((logits.softmax(-1) @ value).transpose(0, 1).flatten(1))
        tokens, sizes, left = slow_block(
            list(whole[1:]), sizes, list(key.mean(0)[1:]), keep, method.weighted
        )
        places = [places[place] for place in left]
        whole = torch.stack([whole[0], *tokens])
        whole = whole + layer.mlp(layer.layer_norm2(whole))
        first, tokens = whole[0], list(whole[1:])
    found: list[Tensor | None] = [None] * 16
    for place, token in zip(places, tokens, strict=True):
        found[place] = token
    return found


@every_variant
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.74])
def test_the_projector_reads_what_a_tower_by_hand_gives(method: ToMe, ratio: float):
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)[:1]
    seen: list[Tensor] = []
    handle = adapter.projector.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode(), handle:
        record = kept_by(adapter, method, chats, ratio).records[0]
        wanted = tower_by_hand(adapter, adapter.encode(chats), list(record.kept), method)
    assert record.kept[-1] == round(16 * (1 - ratio))
    places = [place for place, token in enumerate(wanted) if token is not None]
    assert record.origin.tolist() == places
    features = seen[0][0][places]
    assert (features - torch.stack([wanted[place] for place in places])).abs().max() < 1e-5


def test_sizes_in_the_engine_add_up_to_the_picture():
    method, seen = watched(ToMe())
    kept_by(adapter_of("llava"), method, FAMILIES["llava"].chats, 0.5)
    assert {view.site for view, *_ in seen} == {Site("tower", 0), Site("tower", 1)}
    for view, *_ in seen:
        sizes = view.signals["sizes"]
        assert sizes.sum(dim=1).eq(16).all()
        assert (sizes.amax() > 1) == (view.site.layer > 0)


def test_a_batch_with_another_number_of_pictures_changes_nothing():
    adapter, chats = adapter_of("llava"), FAMILIES["llava"].chats
    batch = kept_by(adapter, ToMe(), chats, 0.5, "abc")
    for row, one in enumerate(chats):
        alone = kept_by(adapter, ToMe(), [one], 0.5, "abc"[row])
        assert torch.equal(batch.records[row].origin, alone.records[0].origin)


def test_a_model_whose_tokens_are_no_patches_is_refused():
    with pytest.raises(UserError, match="patch_tokens"):
        Session(adapter_of("qwen2_5_vl"), ToMe(), Budget("kept", 0.5))
