"""Synthetic views for timing: tokens like those of an image, and every signal in the shape that `SIGNALS` states."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isqrt

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from espalier.harness.engine.signals.table import SIGNALS
from espalier.methods.base import Need, Site, View

#: Words of the prompt without the visual tokens.
WORDS = 16
#: One head of CLIP ViT-L.
HEAD = 64
#: Edge of a patch in pixels, with a border of one.
PATCH = 16


def features(n: int, width: int) -> Tensor:
    """Return (1, n, width) synthetic tokens: smooth over a grid, plus noise; always the same."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = plane(n)
    coarse = torch.randn(1, width, max(2, rows // 4), max(2, columns // 4), generator=generator)
    smooth = interpolate(coarse, size=(rows, columns), mode="bilinear", align_corners=True)
    noise = torch.randn(1, n, width, generator=generator)
    return noise.add_(smooth.flatten(2).transpose(1, 2))


def plane(n: int) -> tuple[int, int]:
    """Return rows and columns of the rectangle of n tokens that is nearest to a square."""
    rows = next(rows for rows in range(isqrt(n), 0, -1) if n % rows == 0)
    return rows, n // rows


def view_of(tokens: Tensor, site: Site, needs: tuple[Need, ...], of_frames: bool = False) -> View:
    """Return a view of synthetic tokens, on their device, with every signal that is needed.

    It is of one image, or of a video with the lines of one image as frames.
    """
    n = tokens.shape[1]
    place, columns = torch.arange(n, device=tokens.device), plane(n)[1]
    zero, line = torch.zeros_like(place), place // columns
    frame, row = (line, zero) if of_frames else (zero, line)
    return View(
        site=site,
        tokens=tokens,
        grid=torch.stack([frame, zero, row, place % columns], dim=1)[None],
        signals={need.key: signal(need.signal, tokens) for need in needs},
        generators=[torch.Generator().manual_seed(0)],
    )


def signal(name: str, tokens: Tensor) -> Tensor:
    """Return a stand-in for a signal: its producer is no part of selection.

    What has features is cut from the tokens; the rest is random, rows of attention among it.
    """
    (n, width), device = tokens.shape[1:], tokens.device
    exact: Mapping[str, Callable[[], Tensor]] = {
        "text_positions": lambda: torch.arange(n, n + WORDS, device=device)[None],
        "visual_positions": lambda: torch.arange(n, device=device)[None],
        "all_positions": lambda: torch.arange(n, device=device)[None],
        "tile": lambda: torch.zeros(1, n, dtype=torch.long, device=device),
        "sizes": lambda: torch.ones(1, n, device=device),
        "sequence": lambda: torch.arange(-1, n, device=device)[None],
    }
    if name in exact:
        return exact[name]()
    axes = axes_of(name)
    sizes = {"N": n, "M": n, "T": WORDS, "D": width, "H Dk": width, "Dk": HEAD, "Dh": HEAD}
    shape = [sizes.get(axis, PATCH if "+" in axis else 1) for axis in axes]
    if axes[-1] in ("D", "Dk", "Dh", "H Dk"):
        return tokens[:, : shape[-2], : shape[-1]].reshape(shape)
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device).mul_(2).softmax(-1)


def axes_of(name: str) -> list[str]:
    """Return the axes of a signal as its description states them: `["B", "T", "N"]`."""
    match = re.match(r"\(([^)]*)\)", SIGNALS[name])
    assert match is not None  # every description starts with the shape
    return match[1].split(", ")
