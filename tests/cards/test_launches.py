"""Kernels of a pick and of a step, which may only become fewer: on a small model they cost more than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.harness.specs.run_spec import DecodeLoop
from espalier.methods.base import Site, View
from espalier.methods.idpruner import IDPruner
from espalier.methods.none import NoReduction
from espalier.methods.scope import SCOPE
from espalier.methods.select.cosines import cosines
from espalier.methods.select.dpp import dpp_map
from espalier.methods.select.independent import Within, independent_set
from espalier.methods.select.maxmin import farthest_first
from tests.cards.cells import adapter_of
from tests.families import FAMILIES

#: Return a view, or memory that nothing is written to.
FREE = frozenset(
    {"view", "_unsafe_view", "_reshape_alias", "alias", "detach", "expand", "permute", "t"}
    | {"transpose", "unsqueeze", "squeeze", "select", "slice", "split", "split_with_sizes"}
    | {"unbind", "unfold", "diagonal", "as_strided", "lift_fresh"}
    | {"empty", "empty_like", "new_empty", "empty_strided"}
)


class Launches(TorchDispatchMode):
    """Counts them inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.removeprefix("aten::") not in FREE
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], object]) -> int:
    with Launches() as counted:
        call()
    return counted.count


TOKENS = torch.randn(1, 120, 8, generator=torch.Generator().manual_seed(0))
SCORES = torch.rand(1, 120, generator=torch.Generator().manual_seed(1))
GRID = torch.cartesian_prod(*map(torch.arange, (1, 1, 10, 12))).unsqueeze(0)
SIGNALS = {"cls_attention": SCORES, "tile": torch.zeros(1, 120, dtype=torch.long)}
VIEW = View(Site("vision"), TOKENS, GRID, SIGNALS)

NEAR = (SCORES.unsqueeze(2) - SCORES.unsqueeze(1)).abs() < 0.01

#: Most kernels of one pick.
PICKS: dict[str, tuple[float, Callable[[int], object]]] = {
    "divprune": (2.25, lambda keep: farthest_first(cosines(TOKENS), keep)),
    "idpruner": (3.25, partial(IDPruner().plan, VIEW)),
    "independent": (4, lambda keep: independent_set(SCORES, Within(NEAR), keep)),
    "scope": (8, partial(SCOPE().plan, VIEW)),
    "cdpruner": (9, lambda keep: dpp_map(cosines(TOKENS), SCORES, keep)),
}


@pytest.mark.parametrize("name", PICKS)
def test_a_pick_launches_as_few_kernels_as_it_did(name: str) -> None:
    most, select = PICKS[name]
    few, many = (launches(partial(select, keep)) for keep in (20, 60))
    assert (many - few) / 40 <= most


@torch.inference_mode()
def kernels_of_a_step(decode: DecodeLoop) -> float:
    adapter = adapter_of("llava")
    inputs = adapter.encode(list(FAMILIES["llava"].chats[:1]))
    with Session(adapter, NoReduction(), Budget("kept", 0.0), decode=decode) as session:
        few, many = (
            launches(partial(session.generate, inputs, max_new_tokens=count)) for count in (4, 12)
        )
    return (many - few) / 8


def test_a_step_launches_no_more_kernels_than_the_library() -> None:
    assert kernels_of_a_step("loop") <= kernels_of_a_step("generate")


def test_views_and_empty_memory_are_no_kernels() -> None:
    def calls() -> list[Tensor]:
        return [TOKENS[0].T.flatten(1), torch.empty(3), TOKENS + 1, TOKENS.sum()]

    assert launches(calls) == 2
