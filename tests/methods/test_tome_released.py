"""ToMe in the order of its released code: a class token at place 0, and what is left of A before all of B."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from espalier.harness.models.adapter import Adapter
from espalier.methods.base import Plan, PlanError, Site, View
from espalier.methods.select.bipartite import merge_in_sequence
from espalier.methods.tome import ToMe
from tests.families import FAMILIES
from tests.methods.cases import make_view
from tests.methods.runs import adapter_of, kept_by, watched
from tests.methods.towers import TOWERS, chats_of, check_in_tower

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


def slow_block(sequence: list[Slot], n_merged: int) -> list[Slot]:
    """One block over a list: its even places look for partners at the odd ones, the best pairs merge, A goes first."""
    first, second = sequence[::2], sequence[1::2]
    marked = first[:1] if first[0].place < 0 else []
    pairs = []
    for number, a in enumerate(first[len(marked) :]):
        nearness = [cosine(a, b) for b in second]
        best = max(nearness)
        pairs.append((-best, number, a, second[nearness.index(best)]))
    pairs.sort(key=lambda pair: pair[:2])
    sums = {id(b): (b.size * b.token, b.size) for b in second}
    for _, _, a, b in pairs[:n_merged]:
        token, size = sums[id(b)]
        sums[id(b)] = token + a.size * a.token, size + a.size
    left = pairs[n_merged:]
    if marked:
        left.sort(key=lambda pair: pair[1])
    joined = [
        replace(b, token=sums[id(b)][0] / sums[id(b)][1], size=sums[id(b)][1]) for b in second
    ]
    return [*marked, *(a for _, _, a, _ in left), *joined]


def fresh(tokens: Tensor, keys: Tensor, class_token: bool) -> list[Slot]:
    marked = [Slot(-1, torch.zeros(1), torch.ones(1))] if class_token else []
    return marked + [Slot(n, tokens[n], keys[n]) for n in range(len(tokens))]


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("counts", [(110, 80, 60), (143, 143, 100), (72, 36, 18)])
def test_a_tower_of_three_blocks_equals_the_slow_one(counts: tuple[int, ...], class_token: bool):
    view = make_view(RELEASED, [((0, 0, 12, 12),)], seed=counts[0])
    generator = torch.Generator().manual_seed(counts[1])
    extra = int(class_token)
    sizes, order = torch.ones(1, 144), torch.arange(144)[None]
    places = torch.arange(144)
    slow = fresh(view.tokens[0].double(), view.tokens[0].double(), class_token)
    for block, count in enumerate(counts):
        n_tokens = view.tokens.shape[1]
        keys = torch.randn(1, n_tokens, 16, generator=generator)
        by_place = dict(zip(places.tolist(), keys[0].double(), strict=True))
        slow = [replace(slot, key=by_place.get(slot.place, slot.key)) for slot in slow]
        slow = slow_block(slow, n_tokens - count) if count < n_tokens else slow
        sequence = torch.nn.functional.pad(order, (extra, 0), value=-1)
        view = replace(
            view,
            site=Site("tower", block),
            signals={"block_keys": keys, "sizes": sizes, "sequence": sequence},
        )
        plan = RELEASED.plan(view, count)
        plan.check(n_tokens, count)
        assert plan.order is not None
        merged, own = view.tokens, sizes
        if plan.merge is not None:
            merged = plan.merge.apply(view.tokens, count)
            own = torch.zeros(1, count).scatter_add(1, plan.merge.slot, sizes)
        places = places[plan.kept[0]]
        walked = [slot for slot in slow if slot.place >= 0]
        assert places[plan.order[0]].tolist() == [slot.place for slot in walked]
        assert own[0, plan.order[0]].tolist() == [slot.size for slot in walked]
        wanted = torch.stack([slot.token for slot in walked])
        assert torch.allclose(merged[0, plan.order[0]].double(), wanted, atol=1e-5)
        sizes, order = own, plan.order
        grid = view.grid.gather(1, plan.kept[..., None].expand(-1, -1, 4))
        view = replace(view, tokens=merged, grid=grid)
    assert sizes.sum() == 144


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
    assert plan.merge is not None
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
    assert kept == [0, 1, 2]
    assert slot[4] == 1
    assert left == [2, 1, 0]


def test_equal_cosines_go_to_the_lower_place():
    keys = torch.ones(1, 6, 2)
    kept, slot, sequence = merge_in_sequence(keys, torch.tensor([[5, 4, 3, 2, 1, 0]]), 2)
    assert kept.tolist() == [[0, 1, 2, 4]]  # 5 and 3 stand before 1 and join the first of B, 4
    assert slot.tolist() == [[0, 1, 2, 3, 3, 3]]
    assert sequence.tolist() == [[1, 3, 2, 0]]


# ---------------------------------------------------------------- engine


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TOWERS)
def test_on_models(name: str):
    check_in_tower(name, RELEASED)


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
            assert plan.order is not None
            left = [places[slot] for slot in plan.kept[row].tolist()]
            ordered = [left[slot] for slot in plan.order[row].tolist()]
            before.setdefault(tuple(left), []).append(ordered)


def tower_by_hand(adapter: Adapter, inputs: dict, counts: list[int]) -> dict[int, Tensor]:
    """What one picture's tokens become in a CLIP tower that alternates as released, in plain products and lists."""
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
        logits = logits + torch.tensor([slot.size for slot in sequence]).log()
        whole = whole + attention.out_proj((logits.softmax(-1) @ value).transpose(0, 1).flatten(1))
        keys = key.mean(0)
        sequence = [replace(slot, token=whole[n], key=keys[n]) for n, slot in enumerate(sequence)]
        sequence = slow_block(sequence, len(sequence) - 1 - keep)
        whole = torch.stack([slot.token for slot in sequence])
        whole = whole + layer.mlp(layer.layer_norm2(whole))
        sequence = [replace(slot, token=whole[n]) for n, slot in enumerate(sequence)]
    return {slot.place: slot.token for slot in sequence if slot.place >= 0}


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.74])
def test_the_projector_reads_what_a_tower_by_hand_gives(ratio: float):
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)[:1]
    seen: list[Tensor] = []
    handle = adapter.projector.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode(), handle:
        record = kept_by(adapter, RELEASED, chats, ratio).records[0]
        wanted = tower_by_hand(adapter, adapter.encode(chats), list(record.kept))
    places = sorted(wanted)
    assert record.origin.tolist() == places
    features = seen[0][0][places]
    assert (features - torch.stack([wanted[place] for place in places])).abs().max() < 1e-5
    assert kept_by(adapter, ToMe(), chats, ratio).records[0].origin.tolist() != places


# ---------------------------------------------------------------- refusals


def test_an_order_must_hold_each_kept_token_once():
    kept = torch.tensor([[1, 4, 6]])
    Plan(kept, order=torch.tensor([[2, 0, 1]])).check(8, 3)
    for wrong in ([[0, 0, 1]], [[1, 2, 3]], [[0, 1]]):
        with pytest.raises(PlanError, match="each of the 3 kept tokens once"):
            Plan(kept, order=torch.tensor(wrong)).check(8, 3)
