"""Answers of tiny models on the host and on simulated cards: families, placements, and what an outcome is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import espalier
from espalier.harness.api.loaded_models import Model
from espalier.harness.decoding.speculative import forward_times
from espalier.harness.models.adapter import Adapter
from tests import family_runs
from tests.cards.simulated import Cards, as_model, spread
from tests.families import FAMILIES, diffusion_gemma, llada
from tests.tiny import Family

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

#: No share of tokens is removed by these.
WHOLE = frozenset({"none", "vanilla_sd", "sd_tree"})
DRAFTED = frozenset({"vanilla_sd", "sd_tree", "onsd", "specvlm_sd", "pearl", "parallelvlm"})


@cache
def adapter_of(name: str) -> Adapter:
    if name in llada.DENOISING:
        return llada.adapter_of(name, "float32")
    if name in diffusion_gemma.CANVASES:
        return diffusion_gemma.loaded("float32")
    return with_patch_tokens(family_runs.adapter_of(name, "float32"))


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
    asking = {"max_new_tokens": 4, "batch_size": 2, **options}
    applying = {key: asking.pop(key) for key in ("positions", "compressor") if key in asking}
    if method not in WHOLE:
        applying["ratio"] = 0.5
    if method in DRAFTED:
        applying |= {"draft": model, "transport": "sequential"}
    # The rounds that time both sides would take most of a test.
    with warnings.catch_warnings(), patch.multiple(forward_times, TIMED_ROUNDS=1, WARMUP_ROUNDS=1):
        warnings.simplefilter("ignore")
        try:
            with espalier.apply(model, method, **applying) as pruned:
                answers = pruned.ask_many(list(ALL[name].chats[:questions]), **asking)
        except espalier.UserError as error:
            return ["refused", str(error)]
    return [(answer.text, answer.kept_by_step or answer.kept_indices) for answer in answers]


@cache
def _on_host(name: str, method: str, options: tuple[tuple[str, Any], ...]) -> Sequence[Any]:
    return outcome(as_model(adapter_of(name)), name, method, dict(options))


def on_host(name: str, method: str, **options: Any) -> Sequence[Any]:
    """The outcome on the host, computed once a process."""
    return _on_host(name, method, tuple(sorted(options.items())))


def on_cards(name: str, method: str, placement: str, **options: Any) -> Sequence[Any]:
    """The outcome on simulated cards."""
    with Cards():
        model = spread(adapter_of(name), *PLACEMENTS[placement])
        return outcome(model, name, method, options)
