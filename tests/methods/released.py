"""Vectors of released code: its choices on made-up inputs, run once outside of this repository, and the inputs.

`released.json` has repository, commit and function of each method, and the choices of its cases. Inputs follow from a
case's seed with any library.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.methods.base import Site, View

#: Of each released code its repository, commit, function and cases.
TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def vectors(name: str) -> list[dict[str, Any]]:
    """Return the cases of some released code: seed, tokens, keep, params, kept and what it merged."""
    return TABLE[name]["cases"]


def numbers(seed: int, *shape: int) -> Tensor:
    """Return fp32 numbers 2 x / (2^31 - 1) - 1, with x from the generator of Lewis, Goodman and Miller after `seed`."""
    values, x = [], seed
    for _ in range(math.prod(shape)):
        x = x * 48271 % (2**31 - 1)
        values.append(2 * x / (2**31 - 1) - 1)
    return torch.tensor(values, dtype=torch.float64).float().view(shape)


def shares(seed: int, *shape: int) -> Tensor:
    """Return positive fp32 numbers with a few much larger than the others, as attention has."""
    return torch.exp(4 * numbers(seed, *shape))


def released_view(site: Site, tokens: Tensor, side: int, **signals: Tensor) -> View:
    """Return a view of one picture with `side` patches in a row, from tokens (1, N, D) and signals."""
    place = torch.arange(tokens.shape[1])
    none = torch.zeros_like(place)
    grid = torch.stack([none, none, place // side, place % side], dim=1).unsqueeze(0)
    return View(site, tokens, grid, {"tile": none.unsqueeze(0), **signals})


def scenes(seed: int, frames: int, size: int, width: int) -> Tensor:
    """Return (frames, size, width) tokens of three scenes of about equal length, with a third as much noise."""
    scene = numbers(seed, 3, size, width)[torch.arange(frames) * 3 // frames]
    return scene + 0.3 * numbers(seed + 50, frames, size, width)


def released_video(site: Site, tokens: Tensor, columns: int, **signals: Tensor) -> View:
    """Return a view of one video with `columns` tokens in a row, from tokens (T, n, D) and signals (1, N)."""
    frame, place = torch.meshgrid(
        torch.arange(len(tokens)), torch.arange(tokens.shape[1]), indexing="ij"
    )
    grid = torch.stack([frame, 0 * place, place // columns, place % columns], dim=2)
    return View(site, tokens.flatten(0, 1)[None], grid.flatten(0, 1)[None], signals)


def case_video(case: dict[str, Any], site: Site, **signals: Tensor) -> View:
    """Return the video of a case: its seed, frames, rows, columns and width."""
    tokens = scenes(case["seed"], case["frames"], case["rows"] * case["columns"], case["width"])
    return released_video(site, tokens, case["columns"], **signals)
