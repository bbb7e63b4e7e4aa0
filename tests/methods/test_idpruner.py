"""IDPruner against a slow version, by hand, on models, and against what its released code keeps."""

from __future__ import annotations

from functools import partial

import torch

from espalier.methods.base import View
from espalier.methods.idpruner import IDPruner
from espalier.methods.select.cosines import memory_limit
from tests.methods.cases import PREFIX
from tests.methods.released import released_view
from tests.methods.twins import attended_case, check_kept, check_method


def slow_idpruner(method: IDPruner, view: View, row: int, keep: int) -> list[int]:
    weight, tokens = view.signals["cls_attention"][row].double(), view.tokens[row].double()
    low, high = float(weight.min()), float(weight.max())
    units = torch.nn.functional.normalize(tokens, dim=1)
    cosines = (units @ units.T).tolist()
    kept: list[int] = []

    def relevance(i: int) -> float:
        importance = (float(weight[i]) - low) / (high - low + 1e-6)
        if not kept:
            return importance
        like = max(cosines[i][j] for j in kept)
        return method.mmr_lambda * importance - (1 - method.mmr_lambda) * like

    while len(kept) < keep:
        rest = [i for i in range(len(tokens)) if i not in kept]
        kept.append(max(rest, key=lambda i: (relevance(i), -i)))
    return sorted(kept)


test_idpruner = check_method(
    "idpruner",
    slow_idpruner,
    settings=({}, {"mmr_lambda": 0.0}, {"mmr_lambda": 1.0}),
    keeps=(1, 7, 24),
    within={f"limit={limit}": partial(memory_limit, limit) for limit in (0, 2**40)},
    released=lambda case: attended_case(case, PREFIX),
)


def test_three_tokens_by_hand():
    """The second is 0.9 as important as the first and its twin: 0.45 - 0.5 < 0.5 * 0.2 - 0."""
    tokens = torch.tensor([[[1.0, 0], [2, 0], [0, 1], [0, 2]]])
    view = released_view(PREFIX, tokens, 2, cls_attention=torch.tensor([[1.0, 0.9, 0.2, 0.0]]))
    cases = ((IDPruner(), 2, [0, 2]), (IDPruner(0.6), 2, [0, 1]), (IDPruner(), 3, [0, 1, 2]))
    check_kept(view, *cases)
