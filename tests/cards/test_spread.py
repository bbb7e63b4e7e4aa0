"""A model on several cards answers as on one, and keeps the same tokens, whatever the method reads and changes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any

import pytest

from espalier.harness.specs.catalogue import METHODS
from tests.cards.cells import (
    ALL,
    PLACEMENTS,
    REFUSED,
    SITES,
    Cell,
    adapter_of,
    cells_of,
    check,
    needed,
    on_cards,
    on_host,
    outcome,
)
from tests.cards.simulated import Cards, spread
from tests.tiny import Family

#: Family, method, placement and options.
EVERYDAY: list[tuple[str, str, str, dict[str, Any]]] = [
    *(("llava", method, "late", {}) for method in ("none", "aircache", "dart", "sparsevlm")),
    ("llava", "fastv", "early", {}),
    ("llava", "fastv", "tail_first", {}),
    ("llava", "pyramiddrop", "three", {}),
    ("llava", "aircache", "three", {"num_beams": 2}),
    ("llava", "pyramiddrop", "three", {"positions": "renumbered"}),
    ("llava", "fastv", "three", {"compressor": "snapkv", "record": True}),
    ("llava", "vanilla_sd", "late", {}),
    ("llava", "std", "late", {}),
    ("llava", "specvlm_sd", "late", {}),
    ("llava", "onsd", "late", {}),
    *(
        ("llava", method, placement, {"transport": "threads"})
        for method in ("pearl", "parallelvlm")
        for placement in ("one", "late", "three")
    ),
    ("llava", "hired", "tower_cut", {}),
    ("llava", "visionzip", "tower_apart", {}),
    *(("llava", method, "tower_cut", {}) for method in ("ivtp", "tome", "flowcut", "pixelprune")),
    ("gemma3", "fastv", "tower_cut", {}),
    ("gemma3", "pyramiddrop", "tower_apart", {"record": True}),
    ("qwen3_vl", "fastv", "late", {}),
    ("llada_v", "none", "late", {}),
    ("llada_v", "d3tom", "three", {}),
    (
        "llada_v",
        "none",
        "late",
        {"prompt_interval": 2, "generation_interval": 1, "transfer_ratio": 0.5},
    ),
    ("lavida_dream", "fastv_denoising", "late", {}),
    ("lavida_dream", "d3tom", "late", {"prefix_cache": True}),
]


@pytest.mark.sampled(36)
@pytest.mark.parametrize(
    ("name", "method", "placement", "options"), EVERYDAY, ids=lambda value: str(value)
)
def test_a_spread_model_answers_as_on_the_host(
    name: str, method: str, placement: str, options: dict[str, Any]
) -> None:
    assert check(name, method, placement, **options)


DTYPES = ("bfloat16", "float16")


def walk(cells: Iterable[Cell]) -> None:
    """Check cells, usual ones where a method does not take the variation."""
    for name, method, placement, options in cells:
        check(name, method, placement, **options) or check(name, method, placement)


@pytest.mark.slow
@pytest.mark.sampled(60, 1)
@pytest.mark.parametrize("item", ALL.items(), ids=ALL)
def test_every_kind_of_method_meets_every_placement(item: tuple[str, Family]) -> None:
    """By items and not by names: CI leaves out most variants by their names."""
    walk(needed()[item[0]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_every_method_meets_every_adapter(name: str) -> None:
    walk(cell for cell in cells_of(name) if cell not in needed()[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["llava", "onevision_video", "llada_v"])
def test_every_method_in_every_placement(name: str, placement: str) -> None:
    walk(Cell(name, method, placement, {}) for method in METHODS.names())


@pytest.mark.sampled(52, 4)
@pytest.mark.parametrize("run", [*zip(ALL, cycle(DTYPES), strict=False)], ids=str)
def test_half_precision_runs(run: tuple[str, str]) -> None:
    """Rounding differs between cards and host, so that answers are not compared."""
    name, dtype = run
    for _, method, placement, _ in islice(cells_of(name), list(ALL).index(name) % 5, 10, 5):
        outcome_on_cards = on_cards(name, method, placement, dtype)
        assert outcome_on_cards[0] == REFUSED or len(outcome_on_cards) == 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "method", "where"),
    [
        ("llava", "tome", "tower"),
        ("llava", "visionzip", "vision"),
        ("llava", "divprune", "prefix"),
        ("llava", "fastv", "layer"),
        ("llada_v", "d3tom", "block"),
        ("llava", "snapkv", "cache"),
        ("onevision_video", "dycoke", "decode"),
    ],
)
def test_views_are_looked_at(name: str, method: str, where: str) -> None:
    """Of every kind of site: `on_cards` fails if a view has tensors of two devices."""
    SITES.clear()
    options = {"temporal": False} if method == "dycoke" else {}
    assert check(name, method, "three", **options)
    assert where in SITES


@pytest.mark.slow
def test_a_model_is_spread_as_before_after_its_layers_ran_in_halves() -> None:
    """The forwards that move arguments from card to card are back."""
    with Cards():
        model = spread(adapter_of("llada_v"), *PLACEMENTS["late"])
        outcome(model, "llada_v", "d3tom", {})
        assert outcome(model, "llada_v", "none", {}) == on_host("llada_v", "none")
