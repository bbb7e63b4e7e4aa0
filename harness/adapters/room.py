"""Whether a model's weights fit where they are to go, asked before they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.specs import ModelSpec

#: Places by number of the card or `cpu`, and the bytes that are free there.
Room = Mapping[int | str, int]


def free_room() -> Room:
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
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(found, sys.maxsize))


def spread(spec: ModelSpec, room: Room) -> Room:
    """Return what `model.device_map=auto` may take of each place.

    `model.max_memory` sets it; otherwise all that is free, less the card on which a draft is to live where there are
    others.
    """
    if spec.max_memory:
        given = spec.max_memory.items()
        return {int(place) if place.isdecimal() else place: size for place, size in given}
    cards = [place for place in room if place != "cpu"]
    spared = spec.spared_card if len(cards) > 1 else None
    return {place: 0 if place == spared else free for place, free in room.items()}


def check_room(spec: ModelSpec, needed: int, room: Room) -> None:
    """Raise UserError where `needed` bytes of weights do not fit into the places that the run gives them.

    Weights alone: activations and the cache come on top, and nobody knows them before a sample is seen.
    """
    if spec.device_map is not None:
        places = spread(spec, room)
        allowed = sum(places.values())
        if needed > allowed:
            raise UserError(
                f"model={spec.name}: {_gib(needed)} of weights do not fit into {_list(places)}, which "
                f"model.device_map={spec.device_map!r} and model.max_memory leave; "
                f"valid: more room, a smaller model{_half(spec)}"
            )
        return
    place = _place(spec.device)
    free = room[place]
    if needed <= free:
        return
    several = place != "cpu" and sum(room.values()) >= needed
    together = f"model.device_map=auto ({_list(room)}), " if several else ""
    raise UserError(
        f"model={spec.name}: {_gib(needed)} of weights do not fit on model.device={spec.device!r}, where "
        f"{_gib(free)} are free; valid: {together}a smaller model{_half(spec)}"
    )


def _place(device: str) -> int | str:
    name, _, index = device.partition(":")
    return "cpu" if name == "cpu" else int(index or 0)


def _half(spec: ModelSpec) -> str:
    return ", or model.dtype=bfloat16" if spec.dtype == "float32" else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _list(places: Room) -> str:
    named = (
        f"{_gib(size)} of {'card ' * (place != 'cpu')}{place}" for place, size in places.items()
    )
    return ", ".join(named)
