"""Selection time of every configured method over the similarity product X X^T of the same tokens.

The product is the smallest thing a similarity method must do, so the ratio says how much a method
spends beyond the arithmetic that it cannot avoid, on any machine. Methods that build no similarity
matrix can stay below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from harness.config.compose import CONF
from harness.config.spec import RunSpec
from harness.measure.bench_setup import Figure, Setup, paired
from methods.base import Need, Site, TokenReducer, View
from methods.registry import build_method

PART = "selection"

#: Tokens and width: one LLaVA-1.5 image at the tower's width, and one image of the embedded model.
SIZES = ((576, 1024), (144, 192))

#: One token in nine stays, the 64 of 576 that papers compare at.
KEEP_ONE_IN = 9

#: Words of the prompt beside the visual tokens.
WORDS = 16

#: Short procedures are called so often that one timing takes about this long.
LONG_ENOUGH = 4e-3


def selection(setup: Setup) -> list[Figure]:
    """Time every entry of conf/method at each size, on one thread, against the product."""
    names = configured_methods()
    specs = [setup.spec(f"method={name}") for name in names]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [figure for size in SIZES for figure in _at_size(setup, names, specs, *size)]
    finally:
        torch.set_num_threads(before)


def configured_methods() -> list[str]:
    """Return the names that `method=` takes."""
    return sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


@torch.inference_mode()
def _at_size(
    setup: Setup, names: list[str], specs: list[RunSpec], n: int, width: int
) -> list[Figure]:
    tokens = features(n, width)
    keep = n // KEEP_ONE_IN
    repeats = setup.repeats(21, 5)

    def product() -> Tensor:
        return tokens[0] @ tokens[0].T

    figures: list[Figure] = []
    products: list[float] = []
    for name, spec in zip(names, specs, strict=True):
        method = build_method(spec.method.name, spec.method.params)
        sites = method.sites(spec.model.facts.text.layers)
        if not sites or not isinstance(method, TokenReducer):
            continue
        ask = _question(method, view_of(tokens, sites[-1], method.needs(sites[-1])), keep)
        calls = max(1, round(LONG_ENOUGH / min(paired(ask, product, 2).first)))
        pair = paired(ask, product, repeats, calls)
        products += pair.second
        figures.append(pair.figure(PART, f"{name}, N={n} d={width} keep={keep}"))
    unit = Figure(PART, f"the product itself, N={n} d={width}", median(products) * 1e3, "ms")
    return [unit, *figures]


def _question(method: TokenReducer, view: View, keep: int) -> Callable[[], object]:
    """Return the timed procedure: the plan, and the merging that it asks for."""

    def ask() -> object:
        plan = method.plan(view, keep)
        return plan if plan.merge is None else plan.merge.apply(view.tokens, keep)

    return ask


def features(n: int, width: int) -> Tensor:
    """Return (1, n, width) synthetic tokens: smooth over a square grid, plus noise; always the same."""
    generator = torch.Generator().manual_seed(0)
    side = isqrt(n)
    coarse = torch.randn(1, width, max(2, side // 4), max(2, side // 4), generator=generator)
    smooth = interpolate(coarse, size=(side, side), mode="bilinear", align_corners=True)
    noise = torch.randn(1, n, width, generator=generator)
    return smooth.flatten(2).transpose(1, 2) + noise


def view_of(tokens: Tensor, site: Site, needs: tuple[Need, ...]) -> View:
    """Return a view of synthetic tokens with every signal that is needed."""
    n = tokens.shape[1]
    place = torch.arange(n)
    side = isqrt(n)
    zero = torch.zeros_like(place)
    grid = torch.stack([zero, zero, place // side, place % side], dim=1)[None]
    return View(
        site=site,
        tokens=tokens,
        grid=grid,
        signals={need.key: _signal(need.signal, tokens) for need in needs},
        generators=[torch.Generator().manual_seed(0)],
    )


def _signal(name: str, tokens: Tensor) -> Tensor:
    """Return a stand-in of the right shape: the signal's producer is not part of selection."""
    n = tokens.shape[1]
    heads = tokens[None, ..., :64].contiguous()  # one head of CLIP ViT-L
    shapes: Mapping[str, Callable[[], Tensor]] = {
        "tower_keys": lambda: heads[0],
        "wide_tower_keys": lambda: tokens,
        "projected": lambda: tokens,
        "visual_keys": lambda: heads,
        "text_queries": lambda: heads[:, :, :WORDS],
        "text_keys": lambda: heads[:, :, :WORDS],
        "text_embeddings": lambda: tokens[:, :WORDS],
        "all_projected": lambda: tokens,
        "text_states": lambda: tokens[:, :WORDS],
        "normed": lambda: tokens,
        "text_normed": lambda: tokens[:, :WORDS],
        "text_attention": lambda: heads[0, :, :WORDS, :1].sigmoid().expand(-1, -1, n),
        "text_positions": lambda: torch.arange(n, n + WORDS)[None],
        "visual_positions": lambda: torch.arange(n)[None],
        "all_positions": lambda: torch.arange(n)[None],
        "tile": lambda: torch.zeros(1, n, dtype=torch.long),
    }
    if name in shapes:
        return shapes[name]()
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, n, generator=generator).mul(2).softmax(-1)
