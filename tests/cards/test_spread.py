"""A model on several cards answers as on one, and keeps the same tokens, whatever the method reads and changes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.cards.cells import PLACEMENTS, adapter_of, on_cards, on_host, outcome
from tests.cards.simulated import Cards, spread
from tests.families import FAMILIES, diffusion_gemma

#: One of each way to meet the cards: a layer site, several, signals of the norm, of the decoder's input and of the
#: tower, scores of all layers, vision and prefix sites.
FEW = ("none", "fastv", "pyramiddrop", "dart", "sparsevlm", "aircache", "divprune", "visionzip")

#: Further ones that read or change a decoder layer or its cache.
MORE = (
    *("feather", "specvlm", "pact", "aim", "btp", "top_p", "nuwa", "autoprune", "vscan"),
    *("snapkv", "h2o", "lookm", "vlcache", "prefixkv", "pyramidkv", "keydiff", "elastic"),
    *("hired", "globalcom2", "vispruner", "cdpruner", "prumerge", "visiontrim"),
)
OF_VIDEOS = ("framefusion", "holitom", "prunevid", "sttm", "dycoke", "fastvid", "scissor")
OF_STEPS = (
    *("none", "fastv_denoising", "pyramiddrop_denoising", "fastv_first_step", "d3tom", "d3tom_t"),
    *("redvtp", "visionzip", "fastv"),
)

#: Decoders in parts. A tower in parts is tried with a few families: the library joins states of several layers of
#: DeepSeek-OCR's and Molmo2's, and indexes those of Qwen3-VL's pictures beside videos by masks of the decoder's card.
SPREAD = [name for name in PLACEMENTS if name != "one" and not name.startswith("tower")]

#: Family, method, placement and options.
EVERYDAY: list[tuple[str, str, str, dict[str, Any]]] = [
    *(("llava", method, "late", {}) for method in (*FEW, "specvlm", "vlcache", "feather", "pact")),
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
    ("llava", "hired", "tower_cut", {}),
    ("llava", "visionzip", "tower_apart", {}),
    *(("llava", method, "tower_cut", {}) for method in ("ivtp", "tome", "flowcut", "pixelprune")),
    ("gemma3", "fastv", "tower_cut", {}),
    ("qwen3_vl", "fastv", "late", {}),
    ("llada_v", "none", "late", {}),
    ("llada_v", "d3tom", "three", {}),
    ("llada_v", "none", "late", {"prompt_interval": 2, "generation_interval": 1}),
    ("lavida_dream", "fastv_denoising", "late", {}),
    ("lavida_dream", "d3tom", "late", {"prefix_cache": True}),
]


def check(name: str, method: str, placement: str, **options: Any) -> None:
    expected = on_host(name, method, **options)
    assert on_cards(name, method, placement, **options) == expected


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "method", "placement", "options"), EVERYDAY, ids=lambda value: str(value)
)
def test_a_spread_model_answers_as_on_the_host(
    name: str, method: str, placement: str, options: dict[str, Any]
) -> None:
    assert on_host(name, method, **options)[0] != "refused"
    check(name, method, placement, **options)


@pytest.mark.sampled(1000)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("method", [*FEW, *MORE])
def test_all_methods(method: str, placement: str) -> None:
    check("llava", method, placement)


@pytest.mark.sampled(10_000)
@pytest.mark.parametrize("placement", SPREAD)
@pytest.mark.parametrize(("name", "method"), product(FAMILIES, FEW))
def test_all_families(name: str, method: str, placement: str) -> None:
    check(name, method, placement)


@pytest.mark.sampled(1000)
@pytest.mark.parametrize("placement", SPREAD)
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *product(("onevision_video", "qwen3_vl_video"), OF_VIDEOS),
        *product(("llada_v", "lavida", "lavida_dream"), OF_STEPS),
        *product(diffusion_gemma.CANVASES, FEW),
    ],
)
def test_videos_and_denoised_answers(name: str, method: str, placement: str) -> None:
    check(name, method, placement)


def test_a_model_is_spread_as_before_after_its_layers_ran_in_halves() -> None:
    """The forwards that move arguments from card to card are back."""
    with Cards():
        model = spread(adapter_of("llada_v"), *PLACEMENTS["late"])
        outcome(model, "llada_v", "d3tom", {})
        assert outcome(model, "llada_v", "none", {}) == on_host("llada_v", "none")
