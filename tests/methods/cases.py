"""Views for method tests, and the list of all reducers under test: a new one adds one line to `SETTINGS`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.specs.catalogue import build_method
from espalier.methods.base import Decoder, Need, Site, TokenReducer, View
from espalier.methods.chance import NoChance
from espalier.methods.evs import EVS
from tests.tiny import tiny_spec

DEPTH = 6
BLOCKS = 3
WIDTH = 16
WORDS = 9
HEADS = 6  # more than the number of the entry that a test poisons

#: What of the contract a method cannot keep. ORDER: the order of the sequence decides (strides, alternating sets, ties
#: by nature), so that the choice does not follow the tokens. SHARES: each view, grid cell or neighbourhood has a share,
#: so that equal tokens are not taken from the front.
ORDER, SHARES = "the order decides", "shares of places"
#: Each step's pairs follow from those of the step before, so that rounding one score moves many tokens.
CHAINED = "a rounding moves all later pairs"

#: Every reducer and setting of the contract tests: name, hyper-parameters and, where it must, what of the contract it
#: cannot keep. A new reducer adds a line.
SETTINGS: tuple[tuple[Any, ...], ...] = (
    ("random", {}, ORDER),
    ("random", {"layer": 2}, ORDER),
    ("uniform", {}, ORDER),
    ("pooled", {}, ORDER),
    ("center", {}, ORDER),
    ("downsample", {}, ORDER),
    ("fastv", {}),
    ("fastv", {"queries": "mean"}),
    ("top_p", {"p": 1.0}),
    ("fitprune", {"scheme": ((0.7, 0.5, 0.4, 0.4, 0.2),)}),
    ("dart", {}),
    ("dart", {"pivot_image_token": 2, "pivot_text_token": 0}),
    ("divprune", {}),
    ("dycoke", {}, ORDER),
    ("evs", {}, ORDER),
    ("vidcom2", {}, SHARES),
    ("vidcom2", {"channels": 1.0, "temperature": 0.1}, SHARES),
    ("holitom", {}, ORDER),
    ("holitom", {"tau": 0.0, "beta": 0.2, "K": 3, "r": 0.0}, ORDER),
    ("scissor", {}, ORDER),
    ("scissor", {"tau": 0.2}, ORDER),
    ("framefusion", {"S": -2.0}, ORDER),
    ("sttm", {}, ORDER),
    ("sttm", {"tau_space": -1.0, "layer": 0, "root": 0}, ORDER),
    ("prunevid", {}, ORDER),
    ("prunevid", {"tau": 0.0, "gamma": 0.5, "alpha": 0.8, "M": 0}, ORDER),
    ("fastvid", {}, ORDER),
    ("fastvid", {"c": 2, "tau": -1.0, "p": 2, "d": 0.8}, ORDER),
    ("fastervlm", {}, SHARES),
    ("hired", {}, SHARES),
    ("hired", {"alpha": 0.2, "budget": "stripes"}, SHARES),
    ("globalcom2", {}, SHARES),
    ("globalcom2", {"scores": "attention", "normalise": False}, SHARES),
    ("nuwa", {}, SHARES),
    (
        "nuwa",
        {"salience": "attention", "pillars": "attention", "quantile": 0.55, "guide": "attention"},
        SHARES,
    ),
    ("pyramiddrop", {}),
    ("pyramiddrop", {"layers": (1, 2)}),
    ("pyramiddrop", {"ranking": "next_layer"}),
    ("cdpruner", {}),
    ("cdpruner", {"relevance": "none"}, ORDER),
    ("sparsevlm", {}, ORDER),
    ("sparsevlm", {"raters": "above", "assignment": "euclidean", "cluster": "mean"}, ORDER),
    ("sparsevlm", {"tau": 0.0}),
    ("autoprune", {}),
    ("autoprune", {"slope": 0.3, "x0": 2.0, "tau": 0.0}),
    ("specvlm", {}, ORDER),
    ("specvlm", {"guidance": "last", "layer": 3, "mass": 0.8}, ORDER),
    ("prumerge", {}),
    ("prumerge", {"merging": "sum"}, ORDER),
    ("prumerge", {"uniform": True}, ORDER),
    ("prumerge", {"merging": "sum", "uniform": True, "k": 3}, ORDER),
    ("uvprune", {}),
    ("uvprune", {"L": 4}),
    ("uvprune", {"criterion": "similarity"}),
    ("uvprune", {"criterion": "attention_variation"}),
    ("uvprune", {"criterion": "attention", "L": 3}),
    ("tome", {}, ORDER),
    ("tome", {"proportional": False, "weighted": False}, ORDER),
    ("tome", {"order": "released"}, ORDER),
    ("ivtp", {}),
    ("vispruner", {}, SHARES, CHAINED),
    ("vispruner", {"important_ratio": 0.75}, SHARES, CHAINED),
    ("scope", {}, SHARES),
    ("scope", {"alpha": 0.5}, SHARES),
    ("holov", {}, SHARES),
    ("holov", {"cut": "runs", "ranking": "attention", "alpha": 0.09, "missing": "each"}, ORDER),
    ("hiprune", {}, ORDER),
    ("hiprune", {"alpha": 0.5, "border": "clamp"}, ORDER),
    ("vscan", {}, ORDER),
    ("vscan", {"local": 0.25, "window": 3}, ORDER),
    ("flowcut", {}),
    ("pixelprune", {}),
    ("pixelprune", {"tau": 0.1}),
    ("vlmpruner", {}, ORDER, CHAINED),
    ("vlmpruner", {"token_batch": 3, "channels": 6}, ORDER, CHAINED),
    ("btp", {}, ORDER),
    ("btp", {"attention": (0.0, 0.5, 1.0), "places": (0.0, 0.2, 0.0)}, ORDER),
    ("feather", {}, ORDER),
    ("feather", {"layers": (1, 2), "depth": 6, "stride": 2}, ORDER),
    ("pact", {}),
    ("pact", {"cutoff": 0.4, "keep": 0.8}),
    ("aim", {}, ORDER),
    ("aim", {"first": 1, "last": 1}, ORDER),
    ("idpruner", {}),
    ("idpruner", {"mmr_lambda": 0.8}),
    ("visiontrim", {}),
    ("visiontrim", {"dominant": 0.5, "rounds": 0}),
    ("visionzip", {}, ORDER),
    ("visionzip", {"contextual": "target_plus_mean"}, ORDER),
    ("rtprune", {}),
    ("rtprune", {"merging": "none"}),
    ("rtprune", {"merging": "visionzip"}),
    ("rtprune", {"merging": "sparsevlm"}),
    ("rtprune", {"merging": "nuwa"}),
    ("rtprune", {"merging": "gtp"}),
    ("d2pruner", {}),
    ("d2pruner", {"alpha": 0.5, "K": 5}, SHARES),
    ("d2pruner", {"selection": "importance"}),
    ("d2pruner", {"pivot_exclusion": True}),
)

#: Name and hyper-parameters of each.
CASES: tuple[tuple[str, dict[str, Any]], ...] = tuple((line[0], line[1]) for line in SETTINGS)

#: Tiles of one sample: (image, tile, rows, columns) each.
Tiling = Sequence[tuple[int, int, int, int]]

#: Three samples of 48 tokens, and three pictures of as many, which is what a method sees inside the tower.
SAMPLES: Sequence[Tiling] = (
    ((0, 0, 6, 8),),
    ((0, 0, 8, 6),),
    ((0, 0, 4, 6), (1, 0, 6, 4)),
)
PICTURES: Sequence[Tiling] = (((0, 0, 6, 8),), ((0, 0, 8, 6),), ((0, 0, 4, 12),))

#: Three samples of 48 tokens in videos, for methods that compare frames; the last one has two videos.
VIDEOS: Sequence[Tiling] = (
    tuple((frame, 0, 1, 3) for frame in range(16)),
    tuple((frame, 0, 2, 3) for frame in range(8)),
    tuple((frame, 0, 1 + frame // 8, 3) for frame in range(12)),
)

#: One picture of 12 x 12 tokens.
SQUARE: Sequence[Tiling] = [((0, 0, 12, 12),)]

#: Before the decoder, and before the projector.
PREFIX, VISION = Site("prefix"), Site("vision")

#: Tokens of these samples that a method always keeps: the first frames of the third sample's two videos.
FEWEST: dict[type[TokenReducer], int] = {EVS: 3 + 6}


def facts_of(layers: int) -> ModelFacts:
    """Facts of LLaVA's tiny model with a decoder of so many layers."""
    facts = tiny_spec("llava").facts
    return replace(facts, text=replace(facts.text, layers=layers))


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    name, params = case
    return "-".join([name, *(f"{key}={value}" for key, value in params.items())])


def with_trait(trait: str) -> list[tuple[str, dict[str, Any]]]:
    """The cases that do not keep this part of the contract."""
    return [case for case, line in zip(CASES, SETTINGS, strict=True) if trait in line[2:]]


def signals_of(method: TokenReducer) -> set[str]:
    """What a reducer reads at any of its sites."""
    return {need.signal for site in method.all_sites(BLOCKS, DEPTH) for need in method.needs(site)}


def build(case: tuple[str, dict[str, Any]]) -> TokenReducer:
    return build_method(*case)


def reachable(method: TokenReducer, keep: int, n_tokens: int = 48) -> int:
    """The count nearest `keep` that the method can reach: some have tokens that always stay."""
    lowest = method.fractions(2.0**-60, len(method.all_sites(BLOCKS, DEPTH)))[-1]
    return max(keep, math.ceil(lowest * n_tokens - 1e-9), FEWEST.get(type(method), 1))


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
    method: TokenReducer | Decoder,
    tilings: Sequence[Tiling] | None = None,
    seed: int = 0,
    site: Site | None = None,
) -> View:
    """A view with random tokens and every signal the method asks for at a site, its first if none is given."""
    reduces = isinstance(method, TokenReducer)
    site = site or (method.all_sites(BLOCKS, DEPTH) if reduces else method.sites(DEPTH))[0]
    usual = VIDEOS if reduces and method.needs_frames() else SAMPLES
    tilings = tilings or (PICTURES if site.where == "tower" else usual)
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack([grid_of(tiling) for tiling in tilings])
    n_rows, n_tokens = grid.shape[:2]
    tokens = torch.randn(n_rows, n_tokens, WIDTH, generator=generator)
    signals = {
        need.key: random_signal(need, n_rows, n_tokens, generator) for need in method.needs(site)
    }
    if "tile" in signals:  # crops are views where a model does not stitch them
        signals["tile"] = grid[:, :, 1]
    generators = generators_for(range(n_rows)) if method.draws else NoChance(type(method).__name__)
    return View(site, tokens, grid, signals, generators)


def views_of_sites(method: TokenReducer) -> Iterator[View]:
    """Yield a view at each site of a method that reads or does something else than the sites before it."""
    sites = method.all_sites(BLOCKS, DEPTH)
    kinds = {(site.where, site.stage > 0, method.needs(site)): site for site in reversed(sites)}
    for site in kinds.values():
        yield make_view(method, site=site)


def random_signal(need: Need, n_rows: int, n_tokens: int, generator: torch.Generator) -> Tensor:
    if need.signal in ("tower_keys", "wide_tower_keys", "block_keys", "tower_states"):
        return torch.randn(n_rows, n_tokens, WIDTH, generator=generator)
    if need.signal == "sequence":  # with a class token first
        shuffled = torch.rand(n_rows, n_tokens, generator=generator).argsort(dim=1)
        return torch.nn.functional.pad(shuffled, (1, 0), value=-1)
    if need.signal == "pixels":
        return torch.rand(n_rows, n_tokens, 12, generator=generator)
    if need.signal == "sizes":
        return torch.randint(1, 5, (n_rows, n_tokens), generator=generator).float()
    words = word_signal(need.signal, n_rows, n_tokens, generator)
    return torch.rand(n_rows, n_tokens, generator=generator) + 0.01 if words is None else words


def word_signal(name: str, n_rows: int, n_tokens: int, generator: torch.Generator) -> Tensor | None:
    """Signals that have a word or a head for an axis: three words, the visual tokens, the other words."""
    before, wide = (n_rows, WORDS, WIDTH), (n_rows, n_tokens, WIDTH)
    shapes = {
        "text_embeddings": before,
        "text_states": before,
        "text_normed": before,
        "text_keys": (n_rows, HEADS, WORDS, 4),
        "visual_keys": (n_rows, HEADS, n_tokens, 4),
        "next_visual_keys": (n_rows, HEADS, n_tokens, 4),
        "normed": wide,
        "projected": wide,
        "all_projected": wide,
        "luma": (n_rows, n_tokens, 6, 6),
    }
    if name in shapes:
        return torch.randn(shapes[name], generator=generator)
    if name == "text_information":
        return torch.rand(n_rows, 1, generator=generator)
    if name in ("text_attention", "text_rollout"):
        return torch.rand(n_rows, WORDS, n_tokens, generator=generator)
    if name in ("visual_positions", "all_positions"):
        return torch.arange(3, 3 + n_tokens).expand(n_rows, -1)
    if name == "text_positions":
        words = torch.arange(WORDS)
        return torch.where(words < 3, words, words + n_tokens).expand(n_rows, -1)
    return None


def generators_for(names: Sequence[int] | range) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(name) for name in names]


def rows_of_view(view: View, rows: Sequence[int]) -> View:
    """The same view with some of its rows and fresh generators."""
    index = torch.tensor(list(rows))
    signals = {key: value[index] for key, value in view.signals.items()}
    return View(
        view.site, view.tokens[index], view.grid[index], signals, fresh_generators(view, rows)
    )


def fresh_generators(view: View, rows: Sequence[int]) -> Sequence[torch.Generator]:
    """New generators of some rows of a view; of a method that does not draw, those that refuse reading."""
    return view.generators if isinstance(view.generators, NoChance) else generators_for(rows)


def token_axis(key: str) -> int | None:
    """The axis of a signal that runs over visual tokens, by its documented shape; None if it is about words alone."""
    shape = SIGNALS[key.partition("@")[0]].partition(")")[0].lstrip("(").split(", ")
    return next((axis for axis, name in enumerate(shape) if name in ("N", "M")), None)


def permuted(view: View, order: Tensor) -> View:
    """The same view with its tokens in another order (N,); words stay where they are."""
    signals = {}
    for key, value in view.signals.items():
        axis = token_axis(key)
        signals[key] = value if axis is None else value.index_select(axis, order)
    fresh = fresh_generators(view, range(len(view.tokens)))
    return View(view.site, view.tokens[:, order], view.grid[:, order], signals, fresh)


def replaced(view: View, tokens: Tensor | None = None, **signals: Tensor) -> View:
    """The same view with other tokens or signals, and fresh generators."""
    new = view.tokens if tokens is None else tokens
    fresh = fresh_generators(view, range(len(view.tokens)))
    return View(view.site, new, view.grid, {**view.signals, **signals}, fresh)
