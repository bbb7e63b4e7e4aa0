"""ToMe in the raster and in the order of its released code: its schedule, and a tower of merging against lists."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget, BudgetError
from espalier.harness.models.adapter import Adapter
from espalier.methods.base import Plan, PlanError, Site, View
from espalier.methods.select.bipartite import merge_in_sequence
from espalier.methods.tome import ToMe
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.cases import SQUARE, make_view
from tests.methods.runs import kept_by, watched
from tests.methods.towers import TOWERS, chats_of
from tests.methods.twins import check_method, outcome, seeded
from tests.tiny import model_of

VARIANTS = [ToMe(), ToMe(proportional=False, weighted=False)]


# ---------------------------------------------------------------- schedule


@pytest.mark.parametrize(("keep", "r"), [(192, 384 / 23), (128, 448 / 23), (64, 512 / 23)])
def test_the_published_counts_of_llava(keep: int, r: float):
    """23 blocks of CLIP run on 576 patches: r is 16.7, 19.5 and 22.3 on average, rounded up or down in each block."""
    kept = Budget("kept", 1 - keep / 576).keep(ToMe(), model_of("model=llava15_7b").facts, 576, 32)
    assert (len(kept), kept[-1]) == (23, keep)
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


@pytest.mark.sampled
@pytest.mark.parametrize("n_tokens", [5, 7, 9, 144, 577])
def test_integers_keep_to_the_half(n_tokens: int):
    """Rounding never asks a block for more than the tokens at even places."""
    facts = model_of("model=llava15_7b").facts
    for keep in range(1, n_tokens + 1):
        budget = Budget("kept", 1 - keep / n_tokens)
        for before, after in pairwise(
            (n_tokens, *budget.keep(ToMe(), facts, n_tokens, 32)),
        ):
            assert before // 2 <= after <= before


def test_what_the_blocks_cannot_reach_is_refused():
    """The embedded model's tower runs three blocks: an eighth is left at least."""
    facts = model_of("model=seedling").facts
    assert Budget("kept", 0.87).keep(ToMe(), facts, 144, 8)[-1] == 19
    with pytest.raises(BudgetError, match=r"ratio=0\.9 cannot be met .* 0 <= ratio < 0\.875"):
        Budget("kept", 0.9).keep(ToMe(), facts, 144, 8)


# ---------------------------------------------------------------- merging


RELEASED = ToMe(order="released")


@dataclass
class Slot:
    """One entry of the sequence; the class token stands at place -1 of the raster."""

    place: int
    token: Tensor
    key: Tensor
    size: float = 1.0


def cosine(a: Slot, b: Slot) -> float:
    return float(a.key @ b.key / (a.key.norm() * b.key.norm()))


def joined(group: list[Slot], weighted: bool) -> Slot:
    """What a slot becomes with those that merge into it."""
    weights = [slot.size if weighted else 1.0 for slot in group]
    token = sum(weight * slot.token for weight, slot in zip(weights, group, strict=True))
    return replace(group[0], token=token / sum(weights), size=sum(slot.size for slot in group))


def slow_block(sequence: list[Slot], n_merged: int, method: ToMe) -> list[Slot]:
    """One block over a list: even places look for partners at the odd ones, and the best pairs merge.

    In the raster the class token stands apart; as released it is at place 0, and what is left of the even places goes
    on before all of the odd ones.
    """
    marked = [slot for slot in sequence if slot.place < 0]
    apart = method.order == "raster"
    walked = sequence[len(marked) :] if apart else sequence
    first, second = [slot for slot in walked[::2] if slot.place >= 0], walked[1::2]
    pairs = []
    for number, a in enumerate(first):
        nearness = [cosine(a, b) for b in second]
        best = max(nearness)
        pairs.append((-best, number, a, second[nearness.index(best)]))
    pairs.sort(key=lambda pair: pair[:2])
    groups = {id(b): [b] for b in second}
    for _, _, a, b in pairs[:n_merged]:
        groups[id(b)].append(a)
    left = pairs[n_merged:]
    if marked:
        left.sort(key=lambda pair: pair[1])
    going = [a for _, _, a, _ in left] + [
        joined(group, method.weighted) for group in groups.values()
    ]
    return marked + (sorted(going, key=lambda slot: slot.place) if apart else going)


@pytest.mark.sampled
@pytest.mark.parametrize("counts", [(110, 80, 60), (143, 143, 100), (72, 36, 18)])
@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("method", [*VARIANTS, RELEASED], ids=str)
def test_a_tower_of_three_blocks_equals_the_slow_one(
    method: ToMe, class_token: bool, counts: tuple[int, ...]
):
    """Each block sees what the last one left, by its own keys; sizes add up."""
    view = make_view(method, SQUARE, seed=counts[0])
    generator = torch.Generator().manual_seed(counts[1])
    sizes, places, order = torch.ones(1, 144), torch.arange(144), torch.arange(144)[None]
    slow = [Slot(-1, torch.zeros(1), torch.ones(1))] if class_token else []
    slow += [Slot(n, token, token) for n, token in enumerate(view.tokens[0].double())]
    for block, count in enumerate(counts):
        site, n_tokens = Site("tower", block), view.tokens.shape[1]
        keys = torch.randn(1, n_tokens, 16, generator=generator)
        by_place = dict(zip(places.tolist(), keys[0].double(), strict=True))
        slow = [replace(slot, key=by_place.get(slot.place, slot.key)) for slot in slow]
        slow = slow_block(slow, n_tokens - count, method) if count < n_tokens else slow
        sequence = torch.nn.functional.pad(order, (int(class_token), 0), value=-1)
        signals = {"block_keys": keys, "sizes": sizes, "sequence": sequence}
        needs = method.needs(site)
        view = replace(view, site=site, signals={need.key: signals[need.key] for need in needs})
        plan = method.plan(view, count)
        plan.check(n_tokens, count)
        merged = outcome(view, plan)
        if plan.merge is not None:
            sizes = torch.zeros(1, count).scatter_add(1, plan.merge.slot, sizes)
        places = places[plan.kept[0]]
        order = torch.arange(count)[None] if plan.order is None else plan.order
        walked = [slot for slot in slow if slot.place >= 0]
        assert places[order[0]].tolist() == [slot.place for slot in walked]
        assert sizes[0, order[0]].tolist() == [slot.size for slot in walked]
        wanted = torch.stack([slot.token for slot in walked])
        assert torch.allclose(merged[0, order[0]].double(), wanted, atol=1e-5)
        grid = view.grid.gather(1, plan.kept[..., None].expand(-1, -1, 4))
        view = replace(view, tokens=merged, grid=grid)
    assert sizes.sum() == 144


def slow_tome(method: ToMe, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """One block, by the order and the sizes that it is shown."""
    tokens, keys = (part[row].double() for part in (view.tokens, view.signals["block_keys"]))
    sizes = view.signals.get("sizes", torch.ones(view.tokens.shape[:2]))[row].tolist()
    order = view.signals.get("sequence", torch.arange(len(tokens)).expand(row + 1, -1))[row]
    sequence = [
        Slot(n, tokens[n], keys[n], sizes[n]) if n >= 0 else Slot(n, torch.zeros(1), torch.ones(1))
        for n in order.tolist()
    ]
    left = slow_block(sequence, len(tokens) - keep, method)
    return {slot.place: slot.token for slot in left if slot.place >= 0}


test_tome = check_method(
    "tome",
    slow_tome,
    settings=({}, {"proportional": False, "weighted": False}, {"order": "released"}),
    views=seeded(),
    keeps=(24, 30, 47, 48),
)


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
    assert (kept, merged) == ([1, 2, 3], pytest.approx([(3 * 1 + 10 + 4 * 10000) / 8, 100, 1000]))
    kept, merged = by_hand(ToMe(weighted=False), 3, [3, 1, 1, 1, 4])
    assert (kept, merged) == ([1, 2, 3], pytest.approx([10011 / 3, 100, 1000]))


def test_more_than_half_goes_in_rounds():
    """Two of five at most: 0 and 4 go to 1. Of what is left, 1, 2 and 3, only 2 can be joined; 3 is nearer to it."""
    kept, merged = by_hand(ToMe(), 2, [3, 1, 1, 1, 4])
    assert (kept, merged) == ([1, 2], pytest.approx([(3 * 1 + 10 + 4 * 10000) / 8, 550]))


def pairs_of(order: str, sequence: list[int]) -> tuple[list[int], list[int], list[int] | None]:
    """Five patches, two merges; 0 and 1 have one key, 2 and 3 another, 4 that of 1 but for a little."""
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [5.0, 0.1]]])
    signals = {
        "block_keys": keys,
        "sizes": torch.ones(1, 5),
        "sequence": torch.tensor([sequence]),
    }
    view = View(Site("tower"), keys, torch.zeros(1, 5, 4, dtype=torch.long), signals)
    plan = ToMe(order=order).plan(view, 3)
    left = None if plan.order is None else plan.order[0].tolist()
    return plan.kept[0].tolist(), plan.merge.slot[0].tolist(), left


def test_a_class_token_changes_the_pairs():
    """Apart, A is 0, 2, 4 and all look at 1 and 3; at place 0, A is the class token, 1 and 3, and B is 0, 2, 4."""
    assert pairs_of("raster", [-1, 0, 1, 2, 3, 4]) == ([1, 3, 4], [0, 0, 1, 1, 2], None)
    assert pairs_of("released", [-1, 0, 1, 2, 3, 4]) == ([0, 2, 4], [0, 0, 1, 1, 2], [0, 1, 2])
    # Without one the first block's pairs are those of the raster, and 4, which is left of A, goes first.
    assert pairs_of("released", [0, 1, 2, 3, 4]) == ([1, 3, 4], [0, 0, 1, 1, 2], [2, 0, 1])


def test_the_next_block_alternates_in_the_order_handed_on():
    """4, 1, 3, 0, 2: now A is 4, 3 and 2, B is 1 and 0; 4 and then 3 are nearest to theirs."""
    kept, slot, left = pairs_of("released", [4, 1, 3, 0, 2])
    assert (kept, slot[4], left) == ([0, 1, 2], 1, [2, 1, 0])


def test_equal_cosines_go_to_the_lower_place():
    keys = torch.ones(1, 6, 2)
    kept, slot, sequence = merge_in_sequence(keys, torch.tensor([[5, 4, 3, 2, 1, 0]]), 2)
    assert kept.tolist() == [[0, 1, 2, 4]]  # 5 and 3 stand before 1 and join the first of B, 4
    assert slot.tolist() == [[0, 1, 2, 3, 3, 3]]
    assert sequence.tolist() == [[1, 3, 2, 0]]


# ---------------------------------------------------------------- engine


def tower_by_hand(
    adapter: Adapter, inputs: dict, counts: list[int], method: ToMe
) -> dict[int, Tensor]:
    """What one picture's tokens become in a CLIP tower, in plain products and lists."""
    tower = adapter.tower
    hidden = tower.pre_layrnorm(tower.embeddings(inputs["pixel_values"]))[0]
    sequence = [Slot(n - 1, token, token) for n, token in enumerate(hidden)]
    for layer, keep in zip(tower.encoder.layers, counts, strict=False):
        attention = layer.self_attn
        whole = torch.stack([slot.token for slot in sequence])
        query, key, value = (
            part(layer.layer_norm1(whole)).unflatten(1, (attention.num_heads, -1)).transpose(0, 1)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        logits = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        if method.proportional:
            logits = logits + torch.tensor([slot.size for slot in sequence]).log()
        whole = whole + attention.out_proj((logits.softmax(-1) @ value).transpose(0, 1).flatten(1))
        keys = key.mean(0)
        sequence = [replace(slot, token=whole[n], key=keys[n]) for n, slot in enumerate(sequence)]
        sequence = slow_block(sequence, len(sequence) - 1 - keep, method)
        whole = torch.stack([slot.token for slot in sequence])
        whole = whole + layer.mlp(layer.layer_norm2(whole))
        sequence = [replace(slot, token=whole[n]) for n, slot in enumerate(sequence)]
    return {slot.place: slot.token for slot in sequence if slot.place >= 0}


@pytest.mark.parametrize("method", [*VARIANTS, RELEASED], ids=str)
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.74])
def test_the_projector_reads_what_a_tower_by_hand_gives(method: ToMe, ratio: float):
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)[:1]
    seen: list[Tensor] = []
    handle = adapter.projector.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode(), handle:
        record = kept_by(adapter, method, chats, ratio).records[0]
        wanted = tower_by_hand(adapter, adapter.encode(chats), list(record.kept), method)
    assert record.kept[-1] == round(16 * (1 - ratio))
    places = sorted(wanted)
    assert record.origin.tolist() == places
    features = seen[0][0][places]
    assert (features - torch.stack([wanted[place] for place in places])).abs().max() < 1e-5


@pytest.mark.parametrize("name", TOWERS)
def test_each_site_is_shown_what_the_last_one_left(name: str):
    """Tokens by place: what a plan orders is the sequence of the next block, a class token in front."""
    method, seen = watched(RELEASED)
    adapter = adapter_of(name)
    extra = int(adapter.facts.class_attention == "token")
    kept_by(adapter, method, chats_of(name)[:1], 0.6)
    before: dict[tuple[int, ...], list[int]] = {}
    assert {view.site.layer for view, *_ in seen} == {0, 1}
    for view, _, plan in seen:
        sequence, n_tokens = view.signals["sequence"], view.tokens.shape[1]
        assert sequence.shape[1] == extra + n_tokens
        assert not extra or (sequence[:, 0] == -1).all()
        for row in range(len(sequence)):
            places = (view.grid[row, :, 2] * 100 + view.grid[row, :, 3]).tolist()
            walk = [places[slot] for slot in sequence[row, extra:].tolist()]
            if view.site.layer == 0:
                assert walk == sorted(places)
            else:
                assert walk in before[tuple(places)]
            left = [places[slot] for slot in plan.kept[row].tolist()]
            ordered = [left[slot] for slot in plan.order[row].tolist()]
            before.setdefault(tuple(left), []).append(ordered)


def test_an_order_must_hold_each_kept_token_once():
    kept = torch.tensor([[1, 4, 6]])
    Plan(kept, order=torch.tensor([[2, 0, 1]])).check(8, 3)
    for wrong in ([[0, 0, 1]], [[1, 2, 3]], [[0, 1]]):
        with pytest.raises(PlanError, match="each of the 3 kept tokens once"):
            Plan(kept, order=torch.tensor(wrong)).check(8, 3)
