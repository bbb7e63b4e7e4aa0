"""Answers of tiny models on the host and on simulated cards: families, placements, and what an outcome is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import espalier
from espalier.harness.api.loaded_models import Model
from espalier.harness.decoding.speculative import forward_times
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import METHODS
from espalier.harness.tools.rehearsal.simulated_cards import tensors_of
from espalier.methods.compressor import CacheView
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.reducers import TokenReducer
from espalier.methods.views import View
from tests import family_runs
from tests.cards.simulated import Cards, as_model, spread
from tests.families import FAMILIES, diffusion_gemma, llada
from tests.tiny import Family, chat

ALL: Mapping[str, Family] = {**FAMILIES, **llada.DENOISING, **diffusion_gemma.CANVASES}

#: Where decoder layers begin on the next card, the card of norm, rotary tables and head, the card of the first decoder
#: layer, and where tower layers begin on the next card.
PLACEMENTS: dict[str, tuple[Any, ...]] = {
    "one": ((), 0),
    "early": ((1,), 1),
    "late": ((3,), 1),
    "tail_first": ((3,), 0),
    "three": ((1, 3), 2),
    "tower_apart": ((3,), 2, 1),
    "tower_cut": ((3,), 2, 1, (1,)),
}

#: Adapters with a tower that the library does not run in parts: it joins states of several layers of DeepSeek-OCR's and
#: Molmo2's, and indexes those of Qwen3-VL's pictures beside videos by masks of the decoder's card.
WHOLE_TOWERS = frozenset({"deepseek_ocr", "deepseek_ocr2", "molmo2", "qwen3_vl", "qwen3_vl_moe"})

#: Options of `espalier.apply`; the others are of `ask_many`.
APPLIED = ("positions", "compressor", "temporal", "transport")

#: The first word of an outcome that is a refusal.
REFUSED = "refused"

#: Kinds of site at which a method had a view on cards.
SITES: set[str] = set()

#: No share of tokens is removed by these.
WHOLE = frozenset({"none", "vanilla_sd", "sd_tree"})
DRAFTED = frozenset({"vanilla_sd", "sd_tree", "onsd", "specvlm_sd", "pearl", "parallelvlm"})


@cache
def adapter_of(name: str, dtype: str = "float32") -> Adapter:
    if name in llada.DENOISING:
        return llada.adapter_of(name, dtype)
    if name in diffusion_gemma.CANVASES:
        return diffusion_gemma.loaded(dtype)
    return with_patch_tokens(family_runs.adapter_of(name, dtype))


def with_patch_tokens(adapter: Adapter) -> Adapter:
    """The adapter with methods inside the tower, where its family's visual tokens are patches."""
    facts = replace(adapter.facts, patch_tokens=adapter.data.patch_tokens)
    changed = copy(adapter)
    changed.facts, changed.spec = facts, replace(adapter.spec, facts=facts)
    return changed


def outcome(
    model: Model, name: str, method: str, options: Mapping[str, Any], questions: int = 2
) -> Sequence[Any]:
    """The answers of a family's first chats, in one batch, and the tokens they kept; or the line that refuses them."""
    asking = {"max_new_tokens": 3, "batch_size": 2, **options}
    applying = {key: asking.pop(key) for key in APPLIED if key in asking}
    backend, chats = asking.pop("backend", "drop"), list(ALL[name].chats[:questions])
    if asking.pop("words", False):
        chats[-1] = chat("w1 w2 w3 w4")
    if method not in WHOLE:
        applying["ratio"] = 0.5
    if method in DRAFTED:
        applying = {"transport": "sequential", **applying, "draft": model}
    # The rounds that time both sides would take most of a test.
    with warnings.catch_warnings(), patch.multiple(forward_times, TIMED_ROUNDS=1, WARMUP_ROUNDS=0):
        warnings.simplefilter("ignore")
        try:
            applied = espalier.apply(model, method, **applying)
            spec = applied._checked.spec
            spec = replace(spec, engine=replace(spec.engine, backend=backend))
            applied._checked = replace(applied._checked, spec=spec)
            with applied as pruned:
                answers = pruned.ask_many(chats, **asking)
        except espalier.UserError as error:
            return [REFUSED, str(error)]
    return [(answer.text, answer.kept_by_step or answer.kept_indices) for answer in answers]


@cache
def _on_host(name: str, method: str, options: tuple[tuple[str, Any], ...]) -> Sequence[Any]:
    return outcome(as_model(adapter_of(name)), name, method, dict(options))


def on_host(name: str, method: str, **options: Any) -> Sequence[Any]:
    """The outcome on the host, computed once a process."""
    return _on_host(name, method, tuple(sorted(options.items())))


@lru_cache(4)
def _on_placement(name: str, placement: str, dtype: str) -> Model:
    with Cards():
        return spread(adapter_of(name, dtype), *PLACEMENTS[placement])


def on_cards(
    name: str, method: str, placement: str, dtype: str = "float32", **options: Any
) -> Sequence[Any]:
    """The outcome on simulated cards, where each view of a method lies on one of them."""
    model = _on_placement(name, placement, dtype)
    with Cards(), views_on_one_card(View), views_on_one_card(CacheView):
        return outcome(model, name, method, options)


@contextmanager
def views_on_one_card(kind: type[Any]) -> Iterator[None]:
    """Inside it, a view fails unless all of its tensors lie on one device."""
    init = kind.__init__

    def checked(view: Any, *args: Any, **fields: Any) -> None:
        init(view, *args, **fields)
        devices = {tensor.device for tensor in tensors_of(vars(view))}
        assert len(devices) == 1, f"a {kind.__name__} of tensors on {sorted(map(str, devices))}"
        SITES.add(view.site.where if kind is View else "cache")

    with patch.object(kind, "__init__", checked):
        yield


# ---------------------------------------------------------------------- the matrix

#: What is asked beside the usual: each method has them in turn, where it takes them.
VARIATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 2},
    {"backend": "emulate"},
    {"positions": "renumbered"},
    {"compressor": "snapkv"},
    {"words": True},
    {"record": True},
)


class Cell(NamedTuple):
    family: str
    method: str
    placement: str
    options: dict[str, Any]

    def pairs(self) -> set[tuple[str, ...]]:
        """What meets in the cell; its kind and not the method itself decides what moves from card to card."""
        kind, adapter = kind_of(self.method), ALL[self.family].spec.adapter
        return {
            (self.method,),
            (self.family,),
            (*kind, self.placement),
            (*kind, str(self.options)),
            (adapter, self.placement),
        }


@cache
def kind_of(method: str) -> tuple[str, ...]:
    """The base class of a method, and where a reducer acts."""
    declared = METHODS.load(method)
    sites = declared().read_sites(24, 32) if issubclass(declared, TokenReducer) else ()
    return declared.__mro__[1].__name__, *sorted({site.where for site in sites})


def cells_of(name: str) -> Iterator[Cell]:
    """The cells of a family: with those of all families, each method meets all adapters, each in the next placement.

    Families of one adapter share its methods. Methods of denoising steps alone meet all families that denoise.
    """
    adapters = list(dict.fromkeys(family.spec.adapter for family in ALL.values()))
    adapter = ALL[name].spec.adapter
    alike = [key for key, family in ALL.items() if family.spec.adapter == adapter]
    placements = [
        place for place in PLACEMENTS if adapter not in WHOLE_TOWERS or "tower" not in place
    ]
    for number, method in enumerate(METHODS.names()):
        if issubclass(METHODS.load(method), DenoisingReducer):
            turn, is_met = list(ALL).index(name), name in llada.DENOISING
        else:
            turn = adapters.index(adapter)
            is_met = number // 2 % len(alike) == alike.index(name)
            turn //= 2
        if is_met:
            place = placements[(turn + number) % len(placements)]
            yield Cell(name, method, place, VARIATIONS[(turn + 3 * number) % len(VARIATIONS)])


@cache
def needed() -> Mapping[str, Sequence[Cell]]:
    """The cells of each family by which all pairs of the design are met."""
    cells = [cell for name in ALL for cell in cells_of(name)]
    # In the order of families, the first ones would have nearly all.
    cells.sort(key=lambda cell: crc32(f"{cell.family} {cell.method}".encode()))
    met: set[tuple[str, ...]] = set()
    chosen: dict[str, list[Cell]] = {name: [] for name in ALL}
    for new_pairs in (5, 4, 3, 2, 1):
        for cell in cells:
            if len(cell.pairs() - met) >= new_pairs:
                chosen[cell.family].append(cell)
                met |= cell.pairs()
    return chosen


def check(name: str, method: str, placement: str, **options: Any) -> bool:
    """Fail unless the outcome on cards is that on the host; return whether the method takes the family and options."""
    expected = on_host(name, method, **options)
    assert on_cards(name, method, placement, **options) == expected, (name, method, placement)
    return bool(expected[0] != REFUSED)
