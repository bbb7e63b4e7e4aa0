"""SCOPE against a slow version, by hand, on models, and against what its released code keeps."""

from __future__ import annotations

from functools import partial

import torch

from espalier.methods.base import View
from espalier.methods.scope import SCOPE
from tests.methods.cases import VISION
from tests.methods.crop_views import ROWS, crop_view, crops_with_shares
from tests.methods.released import released_view
from tests.methods.twins import attended_case, check_kept, check_method


def slow_scope(method: SCOPE, view: View, row: int, keep: int) -> list[int]:
    """Crop by crop, one pick after the other, all gains anew."""
    units = torch.nn.functional.normalize(view.tokens[row].double(), dim=1)
    like = (units @ units.T).tolist()
    saliency = view.signals["cls_attention"][row].double() ** method.alpha
    kept: list[int] = []
    for crop, share in crops_with_shares(view, row, keep):
        picks: list[int] = []
        while len(picks) < share:
            cover = {u: max([0.0, *(like[u][s] for s in picks)]) for u in crop}
            merit = {
                v: sum(max(0.0, like[u][v] - cover[u]) for u in crop) * float(saliency[v])
                for v in crop
                if v not in picks
            }
            picks.append(max(merit, key=lambda v: (merit[v], -v)))
        kept += picks
    return sorted(kept)


test_scope = check_method(
    "scope",
    slow_scope,
    settings=({}, {"alpha": 0.5}),
    views=partial(crop_view, width=24),
    varied=ROWS,
    keeps=lambda n_tokens: (1, 5, n_tokens // 3, n_tokens),
    released=lambda case: attended_case(case, VISION),
)


def test_coverage_by_hand():
    """Token 3 covers the most, 0.6 + 0.6 + 0.8 + 1; with half of the attention it stays behind 0, which covers 2.6."""
    tokens = torch.tensor([[[1.0, 0], [1, 0], [0, 1], [0.6, 0.8]]])
    view = released_view(VISION, tokens, 2, cls_attention=torch.ones(1, 4))
    check_kept(view, (SCOPE(), 1, [3]), (SCOPE(), 2, [0, 3]))
    view = released_view(VISION, tokens, 2, cls_attention=torch.tensor([[1, 1, 1, 0.5]]))
    # The gain of 2 is then 1 + 0.2, that of 3 half of 0.8 + 0.4.
    check_kept(view, (SCOPE(), 1, [0]), (SCOPE(), 2, [0, 2]), (SCOPE(alpha=0), 1, [3]))
