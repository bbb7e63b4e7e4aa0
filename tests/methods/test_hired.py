"""HiRED against a slow version of both readings, by hand, and through the engine on real packing."""

from __future__ import annotations

import torch

from espalier.methods.base import Site, View
from espalier.methods.hired import HiRED
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.crop_views import ROWS, best, groups, over_crop, slow_apportion
from tests.methods.runs import logits_of, noted, views_of
from tests.methods.twins import check_method


def view_of(grid, tile, first, last):
    signals = {"cls_attention@0": first, "cls_attention": last, "tile": tile}
    return View(Site("prefix"), torch.zeros(*grid.shape[:2], 2), grid, signals)


def view_of_images(_method: HiRED, _keep: int, name: str) -> View:
    grid, tile = ROWS[name]
    first, last = torch.rand(2, *grid.shape[:2], generator=torch.Generator().manual_seed(0))
    return view_of(grid, tile, first.pow(3), last)


def slow_hired(method: HiRED, view: View, row: int, keep: int) -> list[int]:
    grid, tile = view.grid[row], view.signals["tile"][row]
    first, last = view.signals["cls_attention@0"][row], view.signals["cls_attention"][row]
    tokens_of = groups(grid, tile)
    weights = []
    for image, crop in tokens_of:
        mine = {key: tokens for key, tokens in tokens_of.items() if key[0] == image}
        whole, tokens = mine[image, 0], sum(map(len, mine.values()))
        if len(mine) == 1:
            weights.append(float(tokens))
            continue
        if crop == 0:
            weights.append(method.alpha * tokens)
            continue
        importance = dict.fromkeys(mine, 0.0)
        if method.budget == "mass":
            for token in whole:
                importance[over_crop(grid, tile, token)] += float(first[token])
        else:
            counted = best(first, whole, int(len(whole) * (1 - method.alpha) + 1e-9))
            others = [key for key in mine if key[1] > 0]
            for place, token in enumerate(whole):
                importance[others[place * len(others) // len(whole)]] += token in counted
        total = sum(importance.values())
        weights.append((1 - method.alpha) * tokens * importance[image, crop] / total)
    quotas = slow_apportion(weights, [len(tokens) for tokens in tokens_of.values()], keep)
    kept = [
        best(last, tokens, quota) for tokens, quota in zip(tokens_of.values(), quotas, strict=True)
    ]
    return sorted(token for part in kept for token in part)


test_hired = check_method(
    "hired",
    slow_hired,
    settings=({}, {"alpha": 0.2}, {"budget": "stripes"}, {"alpha": 0.3, "budget": "stripes"}),
    views=view_of_images,
    varied=ROWS,
)


def test_budgets_by_hand():
    """Two crops: the left half of the global view holds three quarters of the first layer's attention."""
    grid, tile = ROWS["wide"]
    first = torch.zeros(1, 48)
    first[0, :16] = torch.tensor([3.0, 3, 1, 1]).repeat(4)
    last = torch.rand(1, 48, generator=torch.Generator().manual_seed(2))
    kept = HiRED().plan(view_of(grid, tile, first, last), 16).kept[0]
    assert tile[0, kept].bincount().tolist() == [8, 6, 2]
    # Of the 8 highest, 4 lie in the upper and 4 in the lower run: stripes see no difference.
    kept = HiRED(budget="stripes").plan(view_of(grid, tile, first, last), 16).kept[0]
    assert tile[0, kept].bincount().tolist() == [8, 4, 4]


def test_the_first_layer_is_the_towers_first():
    """The two attention signals differ, and the first one is that of layer 0."""
    adapter = adapter_of("llava_next")
    module = adapter.tower_attention(0)
    with noted(query=module.q_proj, key=module.k_proj) as seen:
        (view,) = views_of(adapter, HiRED(), FAMILIES["llava_next"].chats[:1])
    first, last = (view.signals[key] for key in ("cls_attention@0", "cls_attention"))
    assert not torch.allclose(first, last)
    attention = logits_of(seen["query"][0], seen["key"][0], 4).softmax(-1).mean(1)[:, 0, 1:]
    assert torch.allclose(first[0, view.grid[0, :, 1] == 0], attention[0], atol=1e-6)
