"""GlobalCom2 against a slow version of both readings, by hand, and through the engine on real packing."""

from __future__ import annotations

import math

import pytest
import torch

from espalier.methods.base import Need, Site, View
from espalier.methods.globalcom2 import GlobalCom2
from espalier.methods.select.crops import Crops, Regions
from tests.families import FAMILIES
from tests.family_runs import adapter_of, shown
from tests.methods.crop_views import ROWS, best, groups, over_crop, slow_apportion, slow_sampled
from tests.methods.runs import logits_of, noted
from tests.methods.twins import check_method

OFFICIAL = GlobalCom2()


def key_of(method: GlobalCom2) -> str:
    return "cls_logits@-1" if method.scores == "logits" else "cls_attention"


def view_of(method, grid, tile, scores):
    signals = {key_of(method): scores, "tile": tile}
    return View(Site("prefix"), torch.zeros(*grid.shape[:2], 2), grid, signals)


def view_of_images(method: GlobalCom2, _keep: int, name: str) -> View:
    grid, tile = ROWS[name]
    scores = torch.randn(grid.shape[:2], generator=torch.Generator().manual_seed(0))
    return view_of(method, grid, tile, scores)


def slow_globalcom2(method: GlobalCom2, view: View, row: int, keep: int) -> list[int]:
    grid, tile = view.grid[row], view.signals["tile"][row]
    scores = view.signals[key_of(method)][row].float()
    tokens_of = groups(grid, tile)
    sampled = slow_sampled(grid, scores)
    weights, combined = [], torch.zeros(len(grid))
    for (image, crop), tokens in tokens_of.items():
        mine = {key: part for key, part in tokens_of.items() if key[0] == image}
        local, seen = scores[tokens], sampled[tokens]
        if method.normalise:
            local, seen = local / local.norm(), seen / seen.norm()
        combined[tokens] = method.alpha * seen + (1 - method.alpha) * local
        if crop == 0:
            weights.append(float(len(tokens)))
            continue
        importance = {key: 0.0 for key in mine if key[1] > 0}
        for token in mine[image, 0]:
            importance[over_crop(grid, tile, token)] += float(scores[token])
        powers = {key: math.exp(value / method.tau) for key, value in importance.items()}
        parts = {
            key: len(mine[key]) * (1 + power / sum(powers.values()) - 1 / len(powers))
            for key, power in powers.items()
        }
        cropped_tokens = sum(len(mine[key]) for key in parts)
        weights.append(cropped_tokens * parts[image, crop] / sum(parts.values()))
    quotas = slow_apportion(weights, [len(tokens) for tokens in tokens_of.values()], keep)
    pairs = zip(tokens_of.values(), quotas, strict=True)
    return sorted(token for tokens, quota in pairs for token in best(combined, tokens, quota))


test_globalcom2 = check_method(
    "globalcom2",
    slow_globalcom2,
    settings=(
        {},
        {"scores": "attention", "normalise": False},
        {"tau": 0.5, "alpha": 0.8},
        {"tau": 0.1, "normalise": False},
    ),
    views=view_of_images,
    varied=ROWS,
)


def test_shares_by_hand():
    """Two crops whose importances differ by tau ln 3: sigma is 3/4 and 1/4, so r is 1.25 R and 0.75 R."""
    grid, tile = ROWS["wide"]
    scores = torch.zeros(1, 48)
    scores[0, :16] = torch.tensor([10 * math.log(3) / 8] * 2 + [0.0] * 2).repeat(4)
    scores[0, 16:] = torch.rand(32, generator=torch.Generator().manual_seed(1))
    crops = Crops.of(grid, tile)
    adjustment = OFFICIAL.adjustment(crops, Regions.of(crops), scores)
    assert adjustment[0, 1:3].tolist() == pytest.approx([1.25, 0.75])
    kept = OFFICIAL.plan(view_of(OFFICIAL, grid, tile, scores), 24).kept[0]
    assert tile[0, kept].bincount().tolist() == [8, 10, 6]


# ---------------------------------------------------------------- the signal


@pytest.mark.parametrize("layer", [None, 0, -1])
@pytest.mark.parametrize("name", ["llava", "onevision_image"])
def test_logits_are_scaled_products_of_queries_and_keys(name: str, layer: int | None):
    """From the layer's own projections: the class token's row, or the mean of all rows where there is none."""
    adapter = adapter_of(name)
    module, needs = adapter.tower_attention(layer), ("cls_logits", "cls_attention")
    with noted(query=module.q_proj, key=module.k_proj) as seen:
        wanted = [Need(need, layer) for need in needs]
        (view,) = shown(adapter, [Site("prefix")], wanted, FAMILIES[name].chats[:1])
    logits = logits_of(seen["query"][0], seen["key"][0], 4)
    by_token = adapter.facts.class_attention == "token"
    expected = logits.mean(1)[:, 0, 1:] if by_token else logits.mean((1, 2))
    whole = view.grid[0, :, 1] == 0
    whole_logits, attention = (view.signals[Need(need, layer).key][0, whole] for need in needs)
    assert (whole_logits - expected[0]).abs().max() < 1e-6
    assert (whole_logits - attention).abs().max() > 1e-3
    assert whole_logits.dtype == torch.float64  # at least single precision
