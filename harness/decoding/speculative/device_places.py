"""Devices of both sides by type and index, so that `cuda` and `cuda:0` are the same place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from espalier.harness.decoding.speculative.main_guard import why_not_imported
from espalier.harness.errors import tell_once
from espalier.harness.specs.run_spec import ModelSpec


def indexed(device: torch.device | str) -> torch.device:
    """Return a device with its index; `cuda` becomes the process's current device."""
    result = torch.device(device)
    if result.type == "cuda" and result.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return result


def placed(model: ModelSpec) -> ModelSpec:
    """Return a model's settings with an indexed device, which means the same in every process."""
    return replace(model, device=str(indexed(model.device)))


def devices_of(model: ModelSpec) -> tuple[torch.device, ...]:
    """Return the devices of a model: its device, or all GPUs if it is spread."""
    device = indexed(model.device)
    if model.device_map is None or device.type != "cuda":
        return (device,)
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def transport_of(
    setting: str, overlap: bool, target: Collection[torch.device], draft: Collection[torch.device]
) -> str:
    """Return the transport of two sides, which `engine.transport=auto` leaves open.

    Sides that work in turn need no second process. Two models on one GPU share it by streams, since two processes would
    only take turns on it; two models elsewhere get a process each, since Python runs one thread at a time. In a script
    that a second process would run again, they get threads, which one line reports.
    """
    if setting != "auto":
        return setting
    if not overlap:
        return "sequential"
    if one_gpu(target, draft):
        return "threads"
    reason = why_not_imported()
    if reason is None:
        return "processes"
    tell_once(
        f"draft and target run in threads: a second process, which is faster, {reason}; valid for processes: the call "
        'below `if __name__ == "__main__":`'
    )
    return "threads"


def one_gpu(target: Collection[torch.device], draft: Collection[torch.device]) -> bool:
    """Return whether both sides are entirely on the same single GPU."""
    devices = {indexed(device) for device in (*target, *draft)}
    return len(devices) == 1 and devices.pop().type == "cuda"


def extra_gpus(target: Sequence[torch.device], draft: Sequence[torch.device]) -> int:
    """Return the number of GPUs that the drafter uses and the target does not."""
    targets = {indexed(device) for device in target}
    return sum(device.type == "cuda" for device in {indexed(place) for place in draft} - targets)
