"""Where both sides work: devices by type and index, so that `cuda` and `cuda:0` are one place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from espalier.harness.specs.run_spec import ModelSpec


def indexed(device: torch.device | str) -> torch.device:
    """Return a device with its index: `cuda` is the process's current one."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def placed(model: ModelSpec) -> ModelSpec:
    """Return a model's settings with its device by index, which means the same in every process."""
    return replace(model, device=str(indexed(model.device)))


def devices_of(model: ModelSpec) -> tuple[torch.device, ...]:
    """Return where a model will be: on its device, or where it is spread, on all GPUs there are."""
    device = indexed(model.device)
    if model.device_map is None or device.type != "cuda":
        return (device,)
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def transport_of(
    asked: str, overlap: bool, target: Collection[torch.device], draft: Collection[torch.device]
) -> str:
    """Return how two sides run where `engine.transport=auto` leaves it open.

    Who works in turn needs no second process. Two models on one GPU share it by streams, for two processes would only
    take turns on it; two models elsewhere get a process each, for Python runs one thread at a time.
    """
    if asked != "auto":
        return asked
    if not overlap:
        return "sequential"
    return "threads" if one_gpu(target, draft) else "processes"


def one_gpu(target: Collection[torch.device], draft: Collection[torch.device]) -> bool:
    """Say whether both sides are wholly on one and the same GPU."""
    both = {indexed(device) for device in (*target, *draft)}
    return len(both) == 1 and both.pop().type == "cuda"


def besides(target: Sequence[torch.device], draft: Sequence[torch.device]) -> int:
    """Return how many GPUs the drafter occupies that the target does not."""
    own = {indexed(device) for device in target}
    return sum(device.type == "cuda" for device in {indexed(one) for one in draft} - own)
