"""Methods inside the vision tower: compared with a tower run by hand, with emulation, and across batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock
from espalier.harness.cost.flops import tower_flops
from espalier.harness.engine.attention_probe import rollout
from espalier.harness.engine.layout import CAUSAL, VisualItem, read_layout, rectangle
from espalier.harness.engine.session import Session
from espalier.harness.engine.signals.decoder_attention import rollout_of_words
from espalier.harness.engine.signals.tower_attention import TowerStates
from espalier.harness.engine.tower_images import ImageOwners, share_out
from espalier.harness.engine.tower_sites import TowerPlanner
from espalier.harness.errors import UserError
from espalier.methods.base import (
    Assignment,
    MethodError,
    Mixture,
    Need,
    Plan,
    Site,
    TokenReducer,
    View,
)
from espalier.methods.none import NoReduction
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.runs import kept_by
from tests.methods.towers import TOWERS, chats_of, check_in_tower


@dataclass(frozen=True)
class Thinning(TokenReducer):
    """A test method for tower blocks: keeps by a hash of the position, merges or not, and stores its views."""

    blocks: tuple[int, ...] = (0, 1)
    merge: str = "none"
    proportional: bool = False
    wants: tuple[str, ...] = ("sizes",)
    views: list | None = None

    def tower_sites(self, blocks: int) -> tuple[Site, ...]:
        return tuple(Site("tower", block) for block in self.blocks)

    def sites(self, depth: int) -> tuple[Site, ...]:
        return ()

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        return tuple(share ** ((n + 1) / n_sites) for n in range(n_sites))

    def needs(self, site: Site) -> tuple[Need, ...]:
        return tuple(map(Need, self.wants))

    def plan(self, view: View, keep: int) -> Plan:
        if self.views is not None:
            self.views.append(view)
        _, _, row, column = view.grid.unbind(-1)
        order = (row * 5 + column * 11 + row * column * 3) % 17
        kept = order.argsort(dim=1, stable=True)[:, :keep].sort(dim=1).values
        n = view.tokens.shape[1]
        slot = torch.searchsorted(kept, torch.arange(n).expand(len(kept), -1).contiguous())
        slot = slot.clamp(max=keep - 1)
        sizes = view.signals["sizes"]
        if self.merge == "sizes":
            total = torch.zeros(len(kept), keep).scatter_add(1, slot, sizes)
            return Plan(kept, Assignment(slot, sizes / total.gather(1, slot)))
        if self.merge == "mixture":
            matrix = torch.nn.functional.one_hot(slot, keep).transpose(1, 2) * 0.25
            kept_mask = torch.nn.functional.one_hot(kept, n)
            return Plan(kept, Mixture(matrix + kept_mask * 0.5))
        return Plan(kept)


CASES = (
    Thinning(),
    Thinning(merge="sizes", proportional=True),
    Thinning(blocks=(1,), merge="mixture", proportional=True),
    Thinning(blocks=(-1, 1)),
)


def ids(method: Thinning) -> str:
    return f"{method.merge}{'-proportional' * method.proportional}-{method.blocks}"


@pytest.mark.sampled(18)
@pytest.mark.parametrize("method", CASES, ids=ids)
@pytest.mark.parametrize("name", TOWERS)
def test_dropping_equals_emulation_and_a_batch_its_rows(name: str, method: Thinning) -> None:
    check_in_tower(name, method)


def test_a_row_of_a_batch_costs_what_it_costs_alone() -> None:
    adapter, chats = adapter_of("llava_next"), chats_of("llava_next")
    batch = kept_by(adapter, CASES[1], chats, 0.6).records
    single = [kept_by(adapter, CASES[1], [row_chat], 0.6).records[0] for row_chat in chats]
    assert [record.work for record in batch] == [record.work for record in single]


def by_hand(tower, pixels: Tensor, counts: list[int], weigh: bool) -> tuple[Tensor, Tensor]:
    """One image through a CLIP tower of two blocks in plain products, merging by `Thinning(merge="sizes")`."""
    hidden = tower.pre_layrnorm(tower.embeddings(pixels))[0]
    place = torch.arange(len(hidden) - 1)
    side = round(len(place) ** 0.5)
    sizes = torch.ones(len(place))
    for layer, keep in zip(tower.encoder.layers, counts, strict=False):
        attention = layer.self_attn
        states = layer.layer_norm1(hidden)
        query, key, value = (
            f(states).unflatten(1, (attention.num_heads, -1)).transpose(0, 1)
            for f in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        logits = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        if weigh:
            logits = logits + torch.cat([torch.zeros(1), sizes.log()])
        mixed = (logits.softmax(-1) @ value).transpose(0, 1).flatten(1)
        hidden = hidden + attention.out_proj(mixed)
        row, column = place // side, place % side
        order = ((row * 5 + column * 11 + row * column * 3) % 17).argsort(stable=True)
        kept = order[:keep].sort().values
        merged = []
        for number, at in enumerate(kept.tolist()):
            first = 0 if number == 0 else int(kept[number - 1]) + 1
            last = len(place) if number == keep - 1 else at + 1
            share = sizes[first:last] / sizes[first:last].sum()
            merged.append((share.unsqueeze(1) * hidden[1 + first : 1 + last]).sum(0))
        ends = [0, *(kept[:-1] + 1).tolist(), len(place)]
        sizes = torch.stack([sizes[a:b].sum() for a, b in pairwise(ends)])
        hidden = torch.cat([hidden[:1], torch.stack(merged)])
        place = place[kept]
        hidden = hidden + layer.mlp(layer.layer_norm2(hidden))
    return hidden[1:], place


@pytest.mark.parametrize("weigh", [False, True])
def test_what_reaches_the_decoder_is_a_tower_run_by_hand(weigh: bool) -> None:
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)[:1]
    inputs = adapter.encode(chats)
    captured = []
    handle = adapter.projector.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    method = Thinning(merge="sizes", proportional=weigh)
    with torch.inference_mode(), handle:
        result = kept_by(adapter, method, chats, 0.6)
        n_pictures = len(inputs["pixel_values"])
        counts = result.records[0].requested
        assert n_pictures == 1
        features, place = by_hand(adapter.tower, inputs["pixel_values"], list(counts), weigh)
    assert torch.equal(result.records[0].origin, place)
    assert (captured[0][0][place] - features).abs().max() < 1e-5


def test_signals_of_a_block_are_those_of_the_plain_tower() -> None:
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)[:1]
    views: list[View] = []
    method = Thinning(blocks=(0, 1), wants=("sizes", "block_keys", "rollout"), views=views)
    kept_by(adapter, method, chats, 0.3)
    inputs = adapter.encode(chats)
    tower = adapter.tower
    with torch.inference_mode():
        hidden = tower.pre_layrnorm(tower.embeddings(inputs["pixel_values"]))
        layer = tower.encoder.layers[0]
        attention, states = layer.self_attn, layer.layer_norm1(hidden)
        query, key = (
            f(states).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
            for f in (attention.q_proj, attention.k_proj)
        )
        weights = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).softmax(-1).mean(1)
    assert (views[0].signals["block_keys"] - key.mean(1)[:, 1:]).abs().max() < 1e-5
    expected = 0.5 * weights[:, 0, 1:]  # the identity's part stays on the class token
    assert (views[0].signals["rollout"] - expected).abs().max() < 1e-6
    assert views[1].signals["sizes"].eq(1).all()


def test_rollout_equals_the_product_of_maps() -> None:
    generator = torch.Generator().manual_seed(0)
    layers, maps = [], []
    for _ in range(3):
        query = torch.randn(2, 4, 11, 6, generator=generator).double()
        key = torch.randn(2, 2, 11, 6, generator=generator).double()
        layers.append((query, key, 0.3))
        logits = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3
        maps.append(logits)
    identity = torch.eye(11).double()
    start = torch.rand(2, 3, 11, generator=generator).double()
    expected = start
    for logits in reversed(maps):
        expected = expected @ (0.5 * logits.softmax(-1).mean(1) + 0.5 * identity)
    assert torch.allclose(rollout(layers, start, lambda *_: None, block=4), expected)

    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[1, :2] = False
    words = torch.tensor([[3, 10, -1], [4, 9, 10]])
    causal = torch.ones(11, 11, dtype=torch.bool).tril() & valid[:, None, None]
    product = identity
    for logits in maps:
        weights = logits.masked_fill(~causal, torch.finfo(torch.float64).min).softmax(-1).mean(1)
        product = (0.5 * weights + 0.5 * identity) @ product
    rows = rollout_of_words(layers, valid, words, [CAUSAL] * len(layers))
    for row in range(2):
        for number, word in enumerate(words[row].tolist()):
            wanted = product[row, word] if word >= 0 else torch.zeros(11).double()
            assert torch.allclose(rows[row, number], wanted)


def test_the_tower_is_restored_also_after_an_error() -> None:
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)

    class Broken(Thinning):
        def plan(self, view: View, keep: int) -> Plan:
            raise MethodError("broken on purpose")

    before = kept_by(adapter, NoReduction(), chats, 0.0).logits
    with pytest.raises(MethodError, match="on purpose"):
        kept_by(adapter, Broken(), chats, 0.5)
    kept_by(adapter, Thinning(), chats, 0.5)
    assert not any("forward" in layer.__dict__ for layer in adapter.tower.encoder.layers)
    assert torch.equal(kept_by(adapter, NoReduction(), chats, 0.0).logits, before)


def test_work_counts_what_the_blocks_ran() -> None:
    adapter, chats = adapter_of("llava"), list(FAMILIES["llava"].chats)[:1]
    (record,) = kept_by(adapter, Thinning(), chats, 0.6).records
    n, (first, second) = record.visual + 1, record.kept
    facts = adapter.facts
    # Block 0 attends with all slots and maps the kept ones; block 1 attends with these and maps those kept again.
    assert record.work.spared_attention == n - (first + 1)
    assert record.work.spared_mlp == (n - first - 1) + (n - second - 1)
    assert record.work.spared_pairs == n**2 - (first + 1) ** 2
    plain = record.work._replace(spared_attention=0, spared_mlp=0, spared_pairs=0)
    assert tower_flops(facts, record.work) < tower_flops(facts, plain)
    everything = plain._replace(spared_attention=2 * n, spared_mlp=2 * n, spared_pairs=2 * n**2)
    assert tower_flops(facts, everything) == 0


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
def test_models_whose_tokens_are_not_patches_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="patch_tokens"):
        Session(adapter_of(name), Thinning(), Budget("kept", 0.5))


def test_tokens_blended_out_of_patches_are_refused() -> None:
    name = "onevision_video"
    with pytest.raises(MethodError, match="blends"):
        kept_by(adapter_of(name), Thinning(), list(FAMILIES[name].chats)[:1], 0.5)


def test_counts_are_shared_out_in_proportion_and_never_fall_back() -> None:
    assert share_out([4, 4], 5) == [3, 2]
    assert share_out([10, 1, 1], 6) == [5, 1, 0]  # the sixth of ten claims 10/11, the one of one 1
    before = [0, 0, 0]
    for total in range(31):
        now = share_out([16, 9, 5], total)
        assert sum(now) == total
        assert all(a <= b for a, b in zip(before, now, strict=True))
        before = now
    assert before == [16, 9, 5]


def test_a_picture_draws_by_its_row_and_its_place_in_it() -> None:
    """Generators do not depend on the position in the batch, so that a row gets the same as a single row."""
    run = object.__new__(TowerPlanner)
    run._owners = ImageOwners([0, 1, 1, 2], [4] * 4, torch.ones(4, 4, dtype=torch.bool))
    run._generators_of = lambda pictures, site: [(*picture, site) for picture in pictures]
    assert run._generators(range(4), 5) == [(0, 0, 5), (1, 0, 5), (1, 1, 5), (2, 0, 5)]


@pytest.mark.parametrize("count", [2, 3])
def test_pictures_without_a_place_in_the_prompts_are_refused(count: int) -> None:
    ids = torch.tensor([[5, 9, 9, 9, 9, 6]])
    item = VisualItem(rectangle(1, 2, 2), torch.arange(4)[:, None])
    assert read_layout(ids, torch.ones_like(ids, dtype=torch.bool), {9: [item]}).counts == (4,)
    with pytest.raises(
        UserError, match=f"^model: {count - 1} images or videos of the batch have no"
    ):
        read_layout(ids, torch.ones_like(ids, dtype=torch.bool), {9: [item] * count})


@pytest.mark.parametrize(("count", "first"), [(24, 16), (23, 16), (27, 18), (4, 3), (3, 2), (1, 1)])
def test_states_of_the_last_third_are_averaged(count: int, first: int) -> None:
    """State i is what layer i - 1 returns; of 24 layers the states 16 to 24 count."""
    layers = [torch.nn.Identity() for _ in range(count)]
    adapter: Any = SimpleNamespace(
        tower_layers=lambda: layers, to_units=lambda hidden: hidden.flatten(0, 1)
    )
    context: Any = SimpleNamespace(parts=adapter, class_tokens=1)
    states = TowerStates(context, Site("prefix"), Need("tower_states"))
    assert states.watched_layers == layers[first - 1 :]
    returned = torch.randn(count, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # nothing is left of the pass before
        handles = states.hook_tower(Clock())
        for picture in range(2):  # two calls of the tower
            for layer, state in zip(layers, returned[:, picture, None], strict=True):
                layer(state)
        for handle in handles:
            handle.remove()
        wanted = returned[first - 1 :, :, 1:].mean(0).flatten(0, 1)
        torch.testing.assert_close(states.units(), wanted)
