"""HiPrune against a slow version of both readings, by hand, on models, and against what its released code keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.harness.engine.signals.tower_attention import tower_layer
from espalier.methods.base import Need, View
from espalier.methods.hiprune import HiPrune
from tests.family_runs import adapter_of
from tests.methods.cases import PREFIX
from tests.methods.crop_views import ROWS, best, crop_view, crops_with_shares
from tests.methods.released import released_view, shares
from tests.methods.twins import check_method, check_released


def slow_hiprune(method: HiPrune, view: View, row: int, keep: int) -> list[int]:
    shallow, deep = view.signals[method.objects.key][row], view.signals["tower_received"][row]
    kept: list[int] = []
    for crop, share in crops_with_shares(view, row, keep):
        columns = sum(int(view.grid[row, i, 2]) == int(view.grid[row, crop[0], 2]) for i in crop)
        anchors = best(shallow, crop, round(share * method.alpha / 5))
        around = set()
        for anchor in anchors:
            place = crop.index(anchor)
            for target in (place - 1, place + 1, place - columns, place + columns):
                if method.border == "clamp":
                    around.add(crop[min(max(target, 0), len(crop) - 1)])
                elif 0 <= target < len(crop):
                    around.add(crop[target])
        buffers = [i for i in crop if i in around and i not in anchors]
        others = [i for i in crop if i not in around and i not in anchors]
        order = [best(deep, some, len(some)) for some in (anchors, buffers, others)]
        kept += [i for some in order for i in some][:share]
    return sorted(kept)


def view_of(shallow: Tensor, deep: Tensor, side: int) -> View:
    signals = {"tower_received@8/24": shallow, "tower_received": deep}
    return released_view(PREFIX, torch.zeros(*deep.shape, 1), side, **signals)


def test_neighbours_by_hand():
    """3 x 3 patches, one anchor of five tokens: places go on from row to row, and readings differ at the first one."""
    deep = torch.arange(9.0).unsqueeze(0)
    at_left = torch.zeros(1, 9).index_fill(1, torch.tensor(3), 1.0)
    for border in ("drop", "clamp"):
        method = HiPrune(alpha=1, border=border)
        assert method.plan(view_of(at_left, deep, 3), 5).kept.tolist() == [[0, 2, 3, 4, 6]]
    at_top = torch.zeros(1, 9).index_fill(1, torch.tensor(2), 1.0)
    kept = HiPrune(alpha=1, border="clamp").plan(view_of(at_top, deep, 3), 5).kept
    assert kept.tolist() == [[0, 1, 2, 3, 5]]
    kept = HiPrune(alpha=1, border="drop").plan(view_of(at_top, deep, 3), 5).kept
    assert kept.tolist() == [[1, 2, 3, 5, 8]]  # 8 is the register


def released_hiprune(case: dict[str, Any]) -> None:
    """Its 24 x 24 patches; attention is far below 1, since the code takes 1 from that of chosen patches."""
    deep, shallow = shares(case["seed"] + 100, 1, 576) / 1000, shares(case["seed"] + 200, 1, 576)
    if case["seed"] == 36:  # anchors at the edges
        shallow[0, [3, 23, 24, 570, 47]] = torch.tensor([900.0, 800, 700, 600, 500])
    check_released(HiPrune(**case["params"], border="clamp"), view_of(shallow, deep, 24), case)


test_hiprune = check_method(
    "hiprune",
    slow_hiprune,
    settings=({}, {"border": "clamp"}, {"alpha": 0.7, "border": "clamp"}),
    views=crop_view,
    varied=ROWS,
    released=released_hiprune,
)


def test_the_object_layer_lies_at_the_same_share_of_a_tower():
    adapter = adapter_of("llava")
    depth = len(adapter.tower_layers())
    assert tower_layer(adapter, Need("tower_received", layer=8, depth=24)) == max(
        0, round(9 * depth / 24) - 1
    )
    assert tower_layer(adapter, Need("tower_received", layer=depth - 1, depth=depth)) == depth - 1
    assert tower_layer(adapter, Need("tower_received", layer=1)) == 1
    assert tower_layer(adapter, Need("tower_received")) is None
