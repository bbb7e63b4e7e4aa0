"""Nuwa against a slow reference: regions, pillars, aggregation, both stages, budgets, and the engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget, equivalent_tokens
from espalier.harness.engine.session import Session
from espalier.methods.base import MethodError, Need, Site, View
from espalier.methods.nuwa import Nuwa
from espalier.methods.select.cells import cells, distances_from, place_in_cell
from espalier.methods.select.surroundings import above_quantile
from tests.families import FAMILIES
from tests.methods.cases import SAMPLES, grid_of, make_view, replaced
from tests.methods.engine import NAMES, OTHERS, check_method
from tests.methods.runs import adapter_of, recall
from tests.methods.twins import check_slow, outcome
from tests.tiny import Recorder, tiny_spec

PAPER = Nuwa()
OFFICIAL = Nuwa(salience="attention", pillars="attention", quantile=0.55, guide="attention")
SQUARE = [((0, 0, 12, 12),)]
#: Edges of odd length, two images, a global view and crops.
ODD = [((0, 0, 5, 7), (0, 1, 3, 3), (1, 0, 3, 2)), ((0, 0, 1, 11), (1, 0, 13, 3))]


# ---------------------------------------------------------------- the slow version


def slow_nuwa(method: Nuwa, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """Kept patches and the new tokens of the first stage, patch by patch."""
    grid = view.grid[row].tolist()
    tokens = view.tokens[row].double().tolist()
    attention = view.signals["cls_attention"][row].double().tolist()
    states = view.signals["tower_states"][row].double().tolist()
    n = len(grid)
    norms = [1.0] * n
    if "wide_tower_keys" in view.signals:
        keys = view.signals["wide_tower_keys"][row].double().tolist()
        norms = [math.sqrt(sum(x * x for x in key)) for key in keys]
    by_keys = method.salience == "attention_key_norm"
    salience = [a * b for a, b in zip(attention, norms, strict=True)] if by_keys else attention

    def first(some: list[int], count: int) -> list[int]:
        return sorted(some, key=lambda j: (-salience[j], j))[:count]

    regions: dict[tuple[int, ...], list[int]] = {}
    for j, (image, part, up, left) in enumerate(grid):
        regions.setdefault((image, part, up // 2, left // 2), []).append(j)
    for quota in (1, 2, 3, 4):
        offered = [j for some in regions.values() for j in first(some, quota)]
        if len(offered) >= keep:
            break
    kept = sorted(first(offered, keep))
    if keep == n:
        return dict(enumerate(view.tokens[row]))
    height = attention if method.pillars == "attention" else norms
    heights = torch.tensor([height[i] for i in kept], dtype=torch.float64)
    level = torch.quantile(heights, method.quantile).item()

    def cosine(x: list[float], y: list[float]) -> float:
        dot = sum(a * b for a, b in zip(x, y, strict=True))
        return dot / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))

    values: dict[int, Tensor] = {}
    for i in kept:
        weights = [0.0] * n
        for j in range(n):
            if grid[i][:2] == grid[j][:2]:
                far = math.dist(grid[i][2:], grid[j][2:]) / math.sqrt(method.reach)
                weights[j] = max(0.0, cosine(states[i], states[j])) * (1 - min(1.0, far))
        weights = [weight / sum(weights) for weight in weights]
        weights[i] = 1.0
        if height[i] > level + 1e-12:
            weights = [float(j == i) for j in range(n)]
        columns = zip(*tokens, strict=True)
        sums = [sum(w * x for w, x in zip(weights, column, strict=True)) for column in columns]
        values[i] = torch.tensor(sums)
    return values


@pytest.mark.parametrize("keep", [1, 2, 9, 12, 13, 30, 47, 48])
@pytest.mark.parametrize("method", [PAPER, OFFICIAL, Nuwa(reach=4.0)], ids=["p", "o", "near"])
def test_the_first_stage_equals_the_slow_one(method: Nuwa, keep: int):
    check_slow(method, make_view(method, SAMPLES, seed=keep), slow_nuwa, (keep,), atol=2e-5)


@pytest.mark.parametrize("keep", [1, 20, 40, 49, 50])
@pytest.mark.parametrize("method", [PAPER, OFFICIAL], ids=["p", "o"])
def test_odd_grids_crops_and_several_images(method: Nuwa, keep: int):
    check_slow(method, make_view(method, ODD, seed=keep), slow_nuwa, (keep,), atol=2e-5)


# ---------------------------------------------------------------- regions, pillars, weights


def test_squares_start_at_the_corner_and_end_at_the_border():
    grid = grid_of([(0, 0, 3, 5), (1, 0, 1, 2)])[None]
    number = cells(grid, 2)[0].tolist()
    rows = [number[0:5], number[5:10], number[10:15]]
    assert rows[0] == rows[1]
    assert rows[0][0] == rows[0][1] != rows[0][2] == rows[0][3] != rows[0][4]
    assert len(set(number)) == 7
    assert not set(number[15:]) & set(number[:15])
    assert place_in_cell(torch.ones(1, 17), cells(grid, 2))[0].tolist() == [
        *(0, 1, 0, 1, 0),
        *(2, 3, 2, 3, 1),
        *(0, 1, 0, 1, 0),
        *(0, 1),
    ]


@pytest.mark.parametrize(
    ("keep", "most"), [(112, 1), (144, 1), (145, 2), (224, 2), (336, 3), (433, 4)]
)
def test_regions_offer_as_many_as_the_authors_take(keep: int, most: int):
    """Of 24 x 24 patches: one, two and three for their three budgets."""
    view = make_view(OFFICIAL, [((0, 0, 24, 24),)])
    kept = OFFICIAL.plan(view, keep).kept[0]
    assert int(cells(view.grid, 2)[0][kept].bincount().max()) == most


def test_distances_end_at_the_view():
    grid = grid_of([(0, 0, 2, 2), (0, 1, 2, 2), (1, 0, 2, 2)])[None]
    apart = distances_from(grid, torch.tensor([[0, 5]]))[0]
    root, inf = math.sqrt(2), math.inf
    assert apart[0].tolist() == pytest.approx([0, 1, 1, root] + [inf] * 8)
    assert apart[1].tolist() == pytest.approx([inf] * 4 + [1, 0, root, 1] + [inf] * 4)


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.55, 0.75, 1.0])
@pytest.mark.parametrize("n", [1, 2, 5, 41])
def test_what_lies_above_a_quantile(n: int, quantile: float):
    """As torch interpolates it in fp64, on distinct values and on ties."""
    values = torch.rand(3, n, generator=torch.Generator().manual_seed(n)).double()
    values[1] = (4 * values[1]).round()
    level = torch.quantile(values, quantile, dim=1, keepdim=True)
    assert torch.equal(above_quantile(values, quantile), values > level + 1e-12)


def test_a_worked_example():
    """A row of five patches, two stay; the strong one is a pillar, the other takes in its like neighbour."""
    states = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]])
    view = View(
        site=Site("vision"),
        tokens=torch.tensor([[[1.0], [10.0], [100.0], [1000.0], [10000.0]]]),
        grid=grid_of([(0, 0, 1, 5)])[None],
        signals={
            "cls_attention": torch.tensor([[0.5, 0.1, 0.05, 0.05, 0.3]]),
            "tower_states": states[None],
        },
    )
    plan = replace(OFFICIAL, reach=9.0).plan(view, 2)
    assert plan.kept.tolist() == [[0, 4]]
    # Patch 1 is 3 away from patch 4, patch 0 is 4 away: a reach of 3 takes in neither, and one of 6 both.
    assert outcome(view, plan).flatten().tolist() == [1, 10000]
    wide = replace(OFFICIAL, reach=36.0).plan(view, 2)
    total = 1 + (1 - 3 / 6) + (1 - 4 / 6)
    wanted = 10000 + 10 * (1 - 3 / 6) / total + 1 * (1 - 4 / 6) / total
    assert outcome(view, wide).flatten().tolist() == pytest.approx([1, wanted])


def test_patches_without_states_stay_as_they_are():
    view = replaced(make_view(OFFICIAL, SQUARE), tower_states=torch.zeros(1, 144, 16))
    plan = OFFICIAL.plan(view, 20)
    assert torch.equal(outcome(view, plan)[0], view.tokens[0, plan.kept[0]])


# ---------------------------------------------------------------- stage 2


def second_view(method: Nuwa, seed: int = 0) -> View:
    """A view at the decoder's site."""
    view = make_view(method, SQUARE * 16, seed)
    generator = torch.Generator().manual_seed(seed)
    signals = {
        "last_attention": torch.rand(16, 144, generator=generator),
        "text_states": torch.randn(16, 9, 16, generator=generator),
    }
    site = method.sites(6)[1]
    return replace(
        view, site=site, signals={need.key: signals[need.key] for need in method.needs(site)}
    )


def test_the_second_stage_of_the_release_is_the_last_tokens_attention():
    view = second_view(OFFICIAL)
    wanted = view.signals["last_attention"].topk(20, dim=1).indices.sort(dim=1).values
    plan = OFFICIAL.plan(view, 20)
    assert torch.equal(plan.kept, wanted)
    assert plan.merge is None


def test_the_second_stage_of_the_paper_is_the_cosine_with_the_mean_word():
    view = second_view(PAPER)
    view.signals["text_states"][3, 5:] = 0.0  # a row of five words, padded
    kept = PAPER.plan(view, 20).kept
    for row in range(16):
        words = view.signals["text_states"][row].double()
        mean = words[: 5 if row == 3 else 9].mean(dim=0)
        found = torch.cosine_similarity(view.tokens[row].double(), mean[None], dim=1)
        assert torch.equal(kept[row], found.topk(20).indices.sort().values)


def test_the_key_norm_counts_in_the_paper_alone():
    view = make_view(PAPER, SQUARE * 16)
    flat = replaced(view, cls_attention=torch.ones(16, 144))
    found, floor, canary = recall(
        PAPER,
        144,
        lambda scores: replaced(flat, wide_tower_keys=scores.unsqueeze(2).expand(-1, -1, 16)),
    )
    assert found > 0.85
    assert canary < floor
    assert "wide_tower_keys" not in {need.signal for need in OFFICIAL.needs(Site("vision"))}


# ---------------------------------------------------------------- budgets, bad input


@pytest.mark.parametrize(("tokens", "kept"), [(64, (112, 16)), (128, (224, 32)), (192, (336, 48))])
def test_the_budget_gives_the_authors_schedules(tokens: int, kept: tuple[int, int]):
    facts = tiny_spec("llava").facts
    facts = replace(facts, text=replace(facts.text, layers=32))
    assert PAPER.sites(32) == (Site("vision"), Site("layer", 16))
    assert Budget("average", 1 - tokens / 576).keep(PAPER, facts, 576, 40) == kept
    assert equivalent_tokens(PAPER, facts, 576, 40, kept).average == tokens


@pytest.mark.parametrize(
    ("tokens", "kept"), [(160, (290, 29)), (320, (582, 58)), (640, (1162, 116))]
)
def test_a_tenth_in_the_second_stage(tokens: int, kept: tuple[int, int]):
    """LLaVA-NeXT: what the authors keep averages their budgets to within a token."""
    facts = tiny_spec("llava").facts
    facts = replace(facts, text=replace(facts.text, layers=32))
    found = Budget("average", 1 - tokens / 2880).keep(Nuwa(second=0.1), facts, 2880, 40)
    assert all(abs(a - b) <= 2 for a, b in zip(found, kept, strict=True))


def test_schedules_fall_and_grow_with_the_share():
    before = (0.0, 0.0)
    for step in range(1, 101):
        now = PAPER.fractions(step / 100, 2)
        assert now[0] >= now[1] == step / 100
        assert all(a >= b for a, b in zip(now, before, strict=True))
        before = now
    assert before == (1, 1)


def test_the_second_stage_acts_in_the_middle():
    assert [Nuwa().sites(depth)[1].layer for depth in (2, 5, 28)] == [1, 2, 14]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("method", [PAPER, OFFICIAL], ids=["p", "o"])
def test_bad_numbers_are_refused_in_the_second_stage_too(method: Nuwa, poison: float):
    view = second_view(method)
    for key, value in view.signals.items():
        bad = value.clone()
        bad[1, 5] = poison
        with pytest.raises(MethodError, match="NaN or infinite"):
            method.plan(replaced(view, **{key: bad}), 12)


# ---------------------------------------------------------------- the signal and the engine


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*NAMES, "deepseek_ocr"])
def test_tower_states_are_the_mean_over_the_last_third(name: str):
    """Against what every block returns, mapped to tokens by the adapter's tables, for one row and in a batch."""
    adapter = adapter_of(name)
    found, hooks = {}, []
    for rows in (FAMILIES[name].chats[:1], FAMILIES[name].chats):
        inputs = adapter.encode(list(rows))
        recorder = Recorder((Site("prefix"),), (Need("tower_states"),))
        with Session(adapter, recorder, Budget("kept", 0.0)) as session:
            session.generate(inputs, max_new_tokens=1, do_sample=False)
        found[len(rows)] = recorder.views
        # The library leaves hooks of its own.
        hooks.append(sum(len(module._forward_hooks) for module in adapter.tower.modules()))
    assert hooks[0] == hooks[1]
    outputs: list[list[Tensor]] = []
    blocks = blocks_of(adapter)

    def note(number: int) -> object:
        def hook(module: object, args: object, output: Tensor) -> None:
            if number == 0:
                outputs.append([])
            outputs[-1].append(output.detach())

        return hook

    handles = [block.register_forward_hook(note(number)) for number, block in enumerate(blocks)]
    inputs = adapter.encode(list(FAMILIES[name].chats[:1]))
    with torch.inference_mode():
        adapter.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    for handle in handles:
        handle.remove()
    first = math.ceil(2 * len(blocks) / 3)
    units = []
    for call in outputs:
        states = torch.stack(call[first - 1 :]).mean(0)
        states = states[None] if states.dim() == 2 else states
        extra = int(adapter.facts.class_attention == "token")
        units.append(adapter.to_units(states[:, extra:]))
    table = torch.cat(units)
    layout = adapter.layout(inputs)
    share = torch.ones_like(layout.source[0]).double() if layout.share is None else layout.share[0]
    wanted = (table[layout.source[0]] * share.unsqueeze(2)).sum(1)
    (view,) = found[1]
    assert torch.allclose(view.signals["tower_states"][0].double(), wanted, atol=1e-6)
    together = [
        row for view in found[len(FAMILIES[name].chats)] for row in view.signals["tower_states"]
    ]
    same = [row for row in together if len(row) == len(wanted)]
    assert any(torch.allclose(row.double(), wanted, atol=1e-6) for row in same)


def blocks_of(adapter: object) -> list[torch.nn.Module]:
    """The layers of a family's tower, by its own names."""
    tower = adapter.tower  # type: ignore[attr-defined]
    tower = getattr(tower, "vision_encoder", tower)
    return list(
        tower.blocks
        if hasattr(tower, "blocks")
        else getattr(tower.encoder, "layers", None) or tower.encoder.layer
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", [PAPER, OFFICIAL], ids=["p", "o"])
@pytest.mark.parametrize("name", OTHERS)
def test_in_the_engine(name: str, method: Nuwa):
    check_method(name, method)
