"""VScan against a slow version, by hand, and against what its released code keeps and merges."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.methods.base import View
from espalier.methods.vscan import VScan
from tests.methods.cases import PREFIX
from tests.methods.crop_views import ROWS, best, crop_view, crops_with_shares, slow_apportion
from tests.methods.released import numbers, released_view, shares
from tests.methods.twins import at_stage, check_method, outcome, slow_highest

LOCAL = "cls_attention@5/24"


def slow_vscan(method: VScan, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """Kept tokens of the first stage, and what they become."""
    deep, shallow = view.signals["cls_attention"][row], view.signals[LOCAL][row]
    tokens = view.tokens[row].double()
    merged: dict[int, Tensor] = {}
    for crop, share in crops_with_shares(view, row, keep):
        corner = view.grid[row, crop[0], 2:]
        windows: dict[tuple[int, ...], list[int]] = {}
        for i in crop:
            place = (view.grid[row, i, 2:] - corner) // method.window
            windows.setdefault(tuple(place.tolist()), []).append(i)
        parts = [windows[place] for place in sorted(windows)]
        lengths = [len(part) for part in parts]
        n_local = int(share * method.local + 1e-9)
        quotas = slow_apportion(lengths, lengths, n_local)
        kept = [
            i for part, quota in zip(parts, quotas, strict=True) for i in best(shallow, part, quota)
        ]
        kept += best(deep, [i for i in crop if i not in kept], share - n_local)
        joined = {i: [i] for i in kept}
        for i in crop if kept else []:
            if i not in kept:
                like = {
                    j: float(torch.cosine_similarity(tokens[i], tokens[j], dim=0)) for j in kept
                }
                joined[max(sorted(like), key=lambda j: like[j])].append(i)
        merged |= {i: tokens[some].mean(dim=0) for i, some in joined.items()}
    return merged


def test_two_windows_by_hand():
    """2 x 4 patches in two windows, two local tokens and one global, and two tokens join what they are like."""
    tokens = torch.tensor([[[1.0, 0], [0, 1], [0, 3], [5, 0], [0, 1], [0, 1], [0, 1], [-1, 0]]])
    shallow = torch.tensor([[9.0, 1, 2, 1, 1, 1, 8, 1]])  # 0 of the left window, 6 of the right
    deep = torch.tensor([[8.0, 1, 1, 1, 1, 1, 9, 7]])  # both are taken, then 7
    view = released_view(PREFIX, tokens, 4, cls_attention=deep, **{LOCAL: shallow})
    plan = VScan(window=2, local=0.7).plan(view, 3)
    assert plan.kept.tolist() == [[0, 6, 7]]
    # 0 takes 3 in, 6 takes 1, 2, 4 and 5.
    torch.testing.assert_close(outcome(view, plan), torch.tensor([[[3.0, 0], [0, 7 / 5], [-1, 0]]]))


def released_vscan(case: dict[str, Any]) -> View:
    """The second stage needs a model in the released code; it is a top-k of one row of attention."""
    deep, shallow = shares(case["seed"] + 100, 1, 576), shares(case["seed"] + 200, 1, 576)
    tokens = numbers(case["seed"], 1, 576, 4)
    return released_view(PREFIX, tokens, 24, cls_attention=deep, **{LOCAL: shallow})


test_vscan = check_method(
    "vscan",
    slow_vscan,
    settings=({"window": 2}, {"local": 0.3, "window": 3}),
    views=crop_view,
    varied=ROWS,
    released=released_vscan,
    sums_atol=2e-5,
)

test_vscan_in_the_decoder = check_method(
    "vscan", partial(slow_highest, "next_last_attention"), views=at_stage, varied=(1,), keeps=(20,)
)
