"""Nuwa against a slow reference: regions, pillars, aggregation, both stages, budgets, and the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget, equivalent_tokens
from espalier.harness.specs.comparable import grouped
from espalier.methods.base import Need, Site, View
from espalier.methods.nuwa import Nuwa
from espalier.methods.select.surroundings import above_quantile
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.cases import SAMPLES, SQUARE, facts_of, grid_of, make_view
from tests.methods.engine import NAMES
from tests.methods.runs import noted
from tests.methods.twins import at_stage, check_method, outcome, seeded, slow_highest

PAPER = Nuwa()
RELEASED = {
    "salience": "attention",
    "pillars": "attention",
    "quantile": 0.55,
    "guide": "attention",
}
OFFICIAL = Nuwa(**RELEASED)
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

    regions = grouped(
        ((image, part, up // 2, left // 2), j) for j, (image, part, up, left) in enumerate(grid)
    )
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


test_nuwa = check_method(
    "nuwa",
    slow_nuwa,
    settings=({}, RELEASED, {"reach": 4.0}),
    views=seeded(SAMPLES),
    keeps=(1, 2, 9, 12, 13, 30, 47, 48),
    atol=2e-5,
)

test_nuwa_on_odd_grids = check_method(
    "nuwa",
    slow_nuwa,
    settings=({}, RELEASED),
    views=seeded(ODD),
    keeps=(1, 20, 40, 49, 50),
    atol=2e-5,
)

test_nuwa_in_the_decoder = check_method(
    "nuwa",
    partial(slow_highest, "last_attention"),
    settings=({"guide": "attention"},),
    views=at_stage,
    varied=(1,),
    keeps=(20,),
)


# ---------------------------------------------------------------- regions, pillars, weights


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


def test_the_second_stage_of_the_paper_is_the_cosine_with_the_mean_word():
    view = second_view(PAPER)
    view.signals["text_states"][3, 5:] = 0.0  # a row of five words, padded
    kept = PAPER.plan(view, 20).kept
    for row in range(16):
        words = view.signals["text_states"][row].double()
        mean = words[: 5 if row == 3 else 9].mean(dim=0)
        similarity = torch.cosine_similarity(view.tokens[row].double(), mean[None], dim=1)
        assert torch.equal(kept[row], similarity.topk(20).indices.sort().values)


# ---------------------------------------------------------------- budgets, bad input


@pytest.mark.parametrize(
    ("method", "n_tokens", "average", "kept", "slack"),
    [
        *((PAPER, 576, n, kept, 0) for n, kept in ((64, (112, 16)), (128, (224, 32)))),
        (PAPER, 576, 192, (336, 48), 0),
        # LLaVA-NeXT: what the authors keep averages their budgets to within a token.
        *((Nuwa(second=0.1), 2880, n, kept, 2) for n, kept in ((160, (290, 29)), (320, (582, 58)))),
        (Nuwa(second=0.1), 2880, 640, (1162, 116), 2),
    ],
)
def test_the_budget_gives_the_authors_schedules(
    method: Nuwa, n_tokens: int, average: int, kept: tuple[int, int], slack: int
):
    facts = facts_of(32)
    schedule = Budget("average", 1 - average / n_tokens).keep(method, facts, n_tokens, 40)
    assert all(abs(a - b) <= slack for a, b in zip(schedule, kept, strict=True))
    exact = equivalent_tokens(method, facts, n_tokens, 40, schedule).average
    assert exact == pytest.approx(average, abs=slack / 2)


# ---------------------------------------------------------------- the signal and the engine


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", [*NAMES, "deepseek_ocr"])
def test_tower_states_are_the_mean_over_the_last_third(name: str):
    """Against what every block returns, mapped to tokens by the adapter's tables, for one row and in a batch."""
    adapter, chats = adapter_of(name), list(FAMILIES[name].chats)
    tower_states, hooks = [], []
    for rows in (chats[:1], chats):
        views = shown(adapter, [Site("prefix")], [Need("tower_states")], rows)
        tower_states.append([row for view in views for row in view.signals["tower_states"]])
        # The library leaves hooks of its own.
        hooks.append(sum(len(module._forward_hooks) for module in adapter.tower.modules()))
    assert hooks[0] == hooks[1]
    blocks, inputs = blocks_of(adapter), adapter.encode(chats[:1])
    last = blocks[math.ceil(2 * len(blocks) / 3) - 1 :]
    with (
        torch.inference_mode(),
        noted(**{str(number): block for number, block in enumerate(last)}) as seen,
    ):
        adapter.model.generate(**inputs, max_new_tokens=1, do_sample=False)
    extra, units = int(adapter.facts.class_attention == "token"), []
    for outputs in zip(*seen.values(), strict=True):  # of each call of the tower
        states = torch.stack(outputs).mean(0)
        states = states[None] if states.dim() == 2 else states
        units.append(adapter.to_units(states[:, extra:]))
    layout = adapter.layout(inputs)
    share = torch.ones_like(layout.source[0]).double() if layout.share is None else layout.share[0]
    wanted = (torch.cat(units)[layout.source[0]] * share.unsqueeze(2)).sum(1)
    for rows in tower_states:
        same = [row for row in rows if len(row) == len(wanted)]
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
