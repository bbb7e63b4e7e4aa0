"""Whether a model and its longest prompt fit where they are to go, asked before weights are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from espalier.harness.errors import UserError

if TYPE_CHECKING:
    from espalier.harness.cost.facts import StackFacts
    from espalier.harness.specs.run_spec import ModelSpec

#: Places by number of the card or `cpu`, and the bytes that are free there.
FreeMemory = Mapping[int | str, int]

#: Rows of the residual stream's width that a layer holds at once for each token: the stream, its norm, queries, keys,
#: values and what attention returns.
ROWS_OF_STREAM = 6

#: Patches of the tower for each visual token, where the projector merges two by two.
PATCHES = 4


def free_bytes() -> FreeMemory:
    """Return the free bytes of this machine's memory (`cpu`) and of each visible card.

    Memory that holds cached files counts as free, for the kernel gives it back; where /proc does not say, nothing is
    taken as short.
    """
    count = torch.cuda.device_count()
    cards: dict[int | str, int] = {n: torch.cuda.mem_get_info(n)[0] for n in range(count)}
    return {**cards, "cpu": _available()}


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return sys.maxsize
    values = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(values, sys.maxsize))


def prompt_bytes(spec: ModelSpec, share: float = 1.0) -> int:
    """Return the bytes that one card needs beside weights for the longest prompt (`spec.longest` tokens).

    The cache of the card's layers; what one layer and one block of the tower hold of all tokens at once; scores of
    eager attention; and one layer's weights, since layers are not divided between cards. An estimate from the sizes
    of the model: allocators take a few percent more.

    Args:
        spec: the model, with the tokens of its longest prompt.
        share: of the layers that stand on the card.
    """
    text, tower, tokens = spec.facts.text, spec.facts.tower, spec.longest
    size: int = getattr(torch, spec.dtype).itemsize
    cache = 2 * text.layers * text.kv_heads * text.head_dim * size * tokens
    layer = _layer_values(text, tokens, spec) * size
    block = _layer_values(tower, PATCHES * tokens, replace(spec, attention="sdpa")) * size
    weights = size * text.hidden * (4 * text.hidden + 3 * text.intermediate)
    return int(cache * share) + max(layer, block) + weights


def _layer_values(stack: StackFacts, tokens: int, spec: ModelSpec) -> int:
    """Return the numbers that one layer holds of `tokens` tokens at once."""
    matrices = 3 if stack.gated else 2
    rows = ROWS_OF_STREAM * stack.hidden + matrices * stack.intermediate
    pairs = stack.heads * tokens * tokens if spec.attention == "eager" else 0
    return tokens * rows + pairs


def weight_limits(spec: ModelSpec, free: FreeMemory) -> FreeMemory:
    """Return what weights may take of each place under `model.device_map=auto`.

    `model.max_memory` sets it; otherwise what is free on the cards, less what the longest prompt needs there, and less
    the card on which a draft is to live where there are others. The host's memory holds layers only under
    `model.offload=true`, or where there is no card.
    """
    if spec.max_memory:
        limits = spec.max_memory.items()
        return {int(place) if place.isdecimal() else place: size for place, size in limits}
    cards = [place for place in free if place != "cpu"]
    spared = spec.spared_card if len(cards) > 1 else None
    free_cards = [card for card in cards if card != spared]
    reserve = prompt_bytes(spec, 1 / max(len(free_cards), 1)) if free_cards else 0
    places = {card: max(free[card] - reserve, 0) if card in free_cards else 0 for card in cards}
    return {**places, "cpu": free["cpu"] if spec.offload or not cards else 0}


def check_memory(spec: ModelSpec, weights: int, free: FreeMemory) -> None:
    """Raise UserError where `needed` bytes of weights do not fit beside the longest prompt."""
    if spec.device_map is not None:
        places = weight_limits(spec, free)
        cards = [place for place in places if place != "cpu"]
        host = places.get("cpu", 0)
        if cards and host and not spec.offload and weights > sum(places[card] for card in cards):
            raise UserError(
                f"model.max_memory gives the host {_gib(host)} of model={spec.name}, from where layers are copied at "
                "each token; valid: model.offload=true, or cpu: 0"
            )
        allowed = sum(places.values())
        if weights > allowed:
            raise UserError(
                f"model={spec.name}: {_gib(weights)} of weights do not fit into {_list(places)}, which "
                f"model.device_map={spec.device_map!r} leaves beside {_prompt(spec)}; "
                f"valid: {_remedies(spec, weights, free)}"
            )
        return
    place = _place(spec.device)
    available = free[place] - (0 if place == "cpu" else prompt_bytes(spec))
    if weights <= available:
        return
    suffix = "" if place == "cpu" else f" beside {_prompt(spec)}"
    raise UserError(
        f"model={spec.name}: {_gib(weights)} of weights do not fit on model.device={spec.device!r}, where "
        f"{_gib(max(available, 0))} are free{suffix}; valid: {_remedies(spec, weights, free)}"
    )


def check_placed(spec: ModelSpec, places: Mapping[str, int | str | torch.device]) -> None:
    """Raise UserError where the library put layers on the host or on disk, and nobody asked for that.

    Args:
        spec: the model.
        places: of its modules, as the library decided (`hf_device_map`).
    """
    slow = sorted({str(place) for place in places.values()} & {"cpu", "disk"})
    if slow and len({str(place) for place in places.values()}) > len(slow) and not spec.offload:
        raise UserError(
            f"model={spec.name}: layers would stand on {' and '.join(slow)}, from where they are copied at each token; "
            "valid: more room on cards, a smaller model, or model.offload=true"
        )


def _remedies(spec: ModelSpec, weights: int, free: FreeMemory) -> str:
    """Return what would fit; a plan is named only if it holds the weights and the longest prompt."""
    remedies = []
    multi_card = len([place for place in free if place != "cpu"]) > 1 and spec.device != "cpu"
    for offload in (False, True):
        plan = replace(spec, device_map="auto", max_memory={}, offload=offload)
        tried = spec.device_map is not None and offload == spec.offload and not spec.max_memory
        possible = (multi_card or offload) and spec.device != "cpu" and not tried
        if possible and weights <= sum(weight_limits(plan, free).values()):
            suffix = ", model.offload=true, slowly" if offload else ""
            remedies.append(f"model.device_map=auto{suffix} ({_list(weight_limits(plan, free))})")
            break
    if spec.longest > 1 and spec.device != "cpu":
        remedies.append("shorter prompts or fewer frames")
    if spec.dtype == "float32":
        remedies.append("model.dtype=bfloat16")
    return ", ".join([*remedies, "a smaller model"])


def _prompt(spec: ModelSpec) -> str:
    return f"a prompt of {spec.longest:,} tokens"


def _place(device: str) -> int | str:
    name, _, index = device.partition(":")
    return "cpu" if name == "cpu" else int(index or 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _list(places: FreeMemory) -> str:
    entries = (
        f"{_gib(size)} of {'card ' * (place != 'cpu')}{place}" for place, size in places.items()
    )
    return ", ".join(entries)
