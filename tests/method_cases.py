"""Views for method tests, and the list of all methods under test: a new method adds one line to `CASES`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from methods.base import Need, TokenReducer, View
from methods.registry import build_method

DEPTH = 6
WIDTH = 16

#: Every method and setting of the contract tests: name in the registry, hyper-parameters.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("random", {}),
    ("random", {"layer": 2}),
    ("uniform", {}),
    ("pooled", {}),
    ("fastv", {}),
    ("fastv", {"queries": "mean"}),
    ("divprune", {}),
    ("visionzip", {}),
    ("visionzip", {"contextual": "target_plus_mean"}),
    ("d2pruner", {}),
    ("d2pruner", {"alpha": 0.5, "K": 5}),
    ("d2pruner", {"selection": "importance"}),
    ("d2pruner", {"pivot_exclusion": True}),
)

#: Tiles of one sample: (image, tile, rows, columns) each.
Tiling = Sequence[tuple[int, int, int, int]]


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    name, params = case
    return "-".join([name, *(f"{key}={value}" for key, value in params.items())])


def build(case: tuple[str, dict[str, Any]]) -> TokenReducer:
    method = build_method(*case)
    assert isinstance(method, TokenReducer)
    return method


def grid_of(tiling: Tiling) -> Tensor:
    """Coordinates (N, 4) of the tokens of some tiles in sequence order."""
    rows = [
        (image, tile, row, column)
        for image, tile, height, width in tiling
        for row in range(height)
        for column in range(width)
    ]
    return torch.tensor(rows)


def make_view(
    method: TokenReducer,
    tilings: Sequence[Tiling] = (((0, 0, 6, 8),), ((0, 0, 8, 6),), ((0, 0, 4, 6), (1, 0, 6, 4))),
    seed: int = 0,
) -> View:
    """A view with random tokens and every signal the method asks for at its first site."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack([grid_of(tiling) for tiling in tilings])
    n_rows, n_tokens = grid.shape[:2]
    site = method.sites(DEPTH)[0]
    tokens = torch.randn(n_rows, n_tokens, WIDTH, generator=generator)
    signals = {
        need.key: random_signal(need, n_rows, n_tokens, generator) for need in method.needs(site)
    }
    return View(site, tokens, grid, signals, generators_for(range(n_rows)))


def random_signal(need: Need, n_rows: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    if need.signal == "tower_keys":
        return torch.randn(n_rows, n_tokens, WIDTH, generator=generator)
    return torch.rand(n_rows, n_tokens, generator=generator) + 0.01


def generators_for(names: Sequence[int] | range) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(name) for name in names]


def rows_of_view(view: View, rows: Sequence[int]) -> View:
    """The same view with some of its rows and fresh generators."""
    index = torch.tensor(list(rows))
    signals = {key: value[index] for key, value in view.signals.items()}
    return View(
        view.site, view.tokens[index], view.grid[index], signals, generators_for(list(rows))
    )


def permuted(view: View, order: Tensor) -> View:
    """The same view with its tokens in another order (N,)."""
    signals = {key: value[:, order] for key, value in view.signals.items()}
    fresh = generators_for(range(len(view.generators)))
    return View(view.site, view.tokens[:, order], view.grid[:, order], signals, fresh)


def replaced(view: View, tokens: Tensor | None = None, **signals: Tensor) -> View:
    """The same view with other tokens or signals, and fresh generators."""
    new = view.tokens if tokens is None else tokens
    fresh = generators_for(range(len(view.generators)))
    return View(view.site, new, view.grid, {**view.signals, **signals}, fresh)
