"""VisPruner against a slow version, by hand, on models, and against what its released code keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor

from espalier.methods.base import View
from espalier.methods.select import nearest
from espalier.methods.select.nearest import Nearest
from espalier.methods.vispruner import VisPruner
from tests.methods.cases import VISION
from tests.methods.crop_views import ROWS, best, crop_view, crops_with_shares
from tests.methods.released import released_view
from tests.methods.twins import attended_case, check_method


def slow_vispruner(method: VisPruner, view: View, row: int, keep: int) -> list[int]:
    """Crop by crop and step by step, over lists."""
    attention, tokens = view.signals["cls_attention"][row], view.tokens[row].double()
    kept: list[int] = []
    for crop, share in crops_with_shares(view, row, keep):
        order = best(attention, crop, len(crop))
        n_important = int(share * method.important_ratio + 1e-9)
        rest, target = order[n_important:], share - n_important
        while target and len(rest) > target:
            first, second = rest[::2], rest[1::2]
            removed = min(8, len(rest) - target, len(first))
            first.sort(key=lambda a: -max(cosine(tokens, a, b) for b in second))
            rest = first[removed:] + second
        kept += order[:n_important] + rest[:target]
    return sorted(kept)


def cosine(tokens: Tensor, a: int, b: int) -> float:
    return float(torch.cosine_similarity(tokens[a], tokens[b], dim=0))


@contextmanager
def lists_of_five() -> Iterator[None]:
    with patch.object(Nearest, "many", 5), patch.object(nearest, "LISTED", (2, 3)):
        yield


test_vispruner = check_method(
    "vispruner",
    slow_vispruner,
    settings=({}, {"important_ratio": 0.0}, {"important_ratio": 0.8}),
    views=crop_view,
    varied=ROWS,
    # Of five: lists of five, made anew when half of the tokens are left.
    within={"": nullcontext, "lists of five": lists_of_five},
    released=lambda case: attended_case(case, VISION),
)


def test_duplicates_by_hand():
    """Two by attention; of the others, by falling attention 2 3 4 5, A is 2 and 4: 4 has a twin in B and goes."""
    tokens = torch.tensor([[[1.0, 1], [1, -1], [1, 0], [0.8, 0.6], [0, 1], [0, 2]]])
    view = released_view(VISION, tokens, 3, cls_attention=torch.tensor([[6.0, 5, 4, 3, 2, 1]]))
    assert VisPruner().plan(view, 5).kept.tolist() == [[0, 1, 2, 3, 5]]
    tokens[0, 2] = tokens[0, 3]
    tokens[0, 4] = torch.tensor([-1.0, 0])
    assert VisPruner().plan(view, 5).kept.tolist() == [[0, 1, 3, 4, 5]]
