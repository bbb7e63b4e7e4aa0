"""Check that a model and its longest prompt fit into memory, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.integrations.accelerate import _get_device_map

from espalier.harness.cost.facts import StackFacts
from espalier.harness.cost.memory import free_memory
from espalier.harness.cost.rehearsed import PATCHES, rehearsed_bytes
from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import ModelSpec

#: Free bytes by number of the GPU, or `cpu`.
FreeMemory = Mapping[int | str, int]

#: Places from which layers are copied for each token.
SLOW = {"cpu", "disk"}

#: Vectors of the hidden size that a layer holds at once for each token: residual stream, its norm, queries, keys,
#: values and the output of attention.
ROWS_OF_STREAM = 6


def free_bytes() -> FreeMemory:
    """Return the free bytes of the host (`cpu`) and of each visible GPU."""
    cards: dict[int | str, int] = {
        n: torch.cuda.mem_get_info(n)[0] for n in range(torch.cuda.device_count())
    }
    return {**cards, "cpu": free_memory()}


def prompt_bytes(spec: ModelSpec, share: float = 1.0) -> int:
    """Return the bytes that one GPU needs in addition to weights for the longest prompt (`spec.longest` tokens).

    The sum of: the KV cache of the GPU's layers; the activations of one layer or one tower block for all tokens, with
    the scores of eager attention. At least what a rehearsal of the model measured for a picture. An estimate from the
    sizes of the model; allocators take a few percent more.

    Args:
        spec: the model, with the length of its longest prompt.
        share: share of the layers on the GPU.
    """
    text, tower, tokens = spec.facts.text, spec.facts.tower, spec.longest
    size: int = getattr(torch, spec.dtype).itemsize
    cache = text.entry_values * size * tokens
    layer = _layer_values(text, tokens, spec) * size
    block = _layer_values(tower, PATCHES * tokens, replace(spec, attention="sdpa")) * size
    return max(int(cache * share) + max(layer, block), rehearsed_bytes().get(spec.name, 0))


def _layer_values(stack: StackFacts, tokens: int, spec: ModelSpec) -> int:
    """Return the number of values that one layer holds at once for `tokens` tokens."""
    matrices = 3 if stack.gated else 2
    rows = ROWS_OF_STREAM * stack.hidden + matrices * stack.intermediate
    pairs = stack.heads * tokens * tokens if spec.attention == "eager" else 0
    return tokens * rows + pairs


def weight_limits(spec: ModelSpec, free: FreeMemory) -> FreeMemory:
    """Return the maximum bytes of weights on each device under `model.device_map=auto`.

    `model.max_memory` sets them. Otherwise: the free bytes of each GPU minus those for the longest prompt, and 0 on the
    GPU of a draft if there are others. The host holds layers only under `model.offload=true`, or without a GPU.
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


def check_memory(
    spec: ModelSpec, weights: int, free: FreeMemory, skeleton: PreTrainedModel | None = None
) -> None:
    """Raise UserError if a model does not fit in memory together with the longest prompt.

    Args:
        spec: the model.
        weights: bytes of its weights.
        free: bytes by device.
        skeleton: the model without weights, if its layers are spread as they are; they are not split between GPUs, so
            that a sum that fits is not enough. None: sums are compared.

    Cost: half a second for the largest.
    """
    if spec.device_map is not None:
        places = weight_limits(spec, free)
        cards = [place for place in places if place != "cpu"]
        host = places.get("cpu", 0)
        if cards and host and not spec.offload and weights > sum(places[card] for card in cards):
            raise UserError(
                f"model.max_memory places {_gib(host)} of model={spec.name} on the host, and those layers are copied "
                "for each token; valid: model.offload=true, or cpu: 0"
            )
        if not _fits(spec, weights, free, skeleton):
            unit = ", layer by layer" if weights <= sum(places.values()) else ""
            raise UserError(
                f"model={spec.name}: {_gib(weights)} of weights do not fit into {_list(places)}{unit}, the memory of "
                f"model.device_map={spec.device_map!r} without {_prompt(spec)}; "
                f"valid: {_remedies(spec, weights, free, skeleton)}"
            )
        return
    name, _, index = spec.device.partition(":")
    place: int | str = "cpu" if name == "cpu" else int(index or 0)
    available = free[place] - (0 if place == "cpu" else prompt_bytes(spec))
    if weights <= available:
        return
    suffix = "" if place == "cpu" else f" besides {_prompt(spec)}"
    raise UserError(
        f"model={spec.name}: {_gib(weights)} of weights do not fit on model.device={spec.device!r}, where "
        f"{_gib(max(available, 0))} are free{suffix}; valid: {_remedies(spec, weights, free, skeleton)}"
    )


def _fits(
    spec: ModelSpec, weights: int, free: FreeMemory, skeleton: PreTrainedModel | None
) -> bool:
    """Return whether `model.device_map` places all weights where they may be."""
    places = weight_limits(spec, free)
    if weights > sum(places.values()):
        return False
    if skeleton is None or spec.offload or len(places) == 1:
        return True
    # The plan that loading makes of the same limits.
    plan = _get_device_map(skeleton, spec.device_map, dict(places), None)
    return not SLOW & {str(place) for place in plan.values()}


def check_placed(spec: ModelSpec, places: Mapping[str, int | str | torch.device]) -> None:
    """Raise UserError if the library placed layers on the host or on disk without `model.offload=true`.

    Args:
        spec: the model.
        places: devices of its modules, chosen by the library (`hf_device_map`).
    """
    slow = sorted(SLOW & {str(place) for place in places.values()})
    if slow and len({str(place) for place in places.values()}) > len(slow) and not spec.offload:
        raise UserError(
            f"model={spec.name}: layers would be placed on {' and '.join(slow)} and copied for each token; "
            "valid: more GPU memory, a smaller model, or model.offload=true"
        )


def _remedies(
    spec: ModelSpec, weights: int, free: FreeMemory, skeleton: PreTrainedModel | None
) -> str:
    """Return settings that would fit; device_map=auto only if it holds the weights and the longest prompt."""
    remedies = []
    multi_card = len([place for place in free if place != "cpu"]) > 1 and spec.device != "cpu"
    for offload in (False, True):
        plan = replace(spec, device_map="auto", max_memory={}, offload=offload)
        tried = spec.device_map is not None and offload == spec.offload and not spec.max_memory
        possible = (multi_card or offload) and spec.device != "cpu" and not tried
        if possible and _fits(plan, weights, free, skeleton):
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


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _list(places: FreeMemory) -> str:
    entries = (
        f"{_gib(size)} of {'card ' * (place != 'cpu')}{place}" for place, size in places.items()
    )
    return ", ".join(entries)
