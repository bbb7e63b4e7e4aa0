"""How many of a block's places are unveiled at each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

#: Names of the schedules.
SCHEDULES = ("linear", "shift", "cosine", "maskgit")


def counts(schedule: str, places: int, steps: int, shift: float = 3.0) -> tuple[int, ...]:
    """Return the places unveiled at each of `steps` steps: at least one each, `places` together.

    `linear` deals them out evenly, what is left over to the first steps. The others follow a curve sigma(t) on
    t = n / steps: differences of floor(sigma(t) places), each at least 1; what is then too much is taken one by one
    from the front, round and round; and the whole is reversed in time, so that a curve that rises early unveils late.

    | schedule  | sigma(t)                                                                               |
    | --------- | -------------------------------------------------------------------------------------- |
    | `shift`   | s t / (1 + (s - 1) t): with s above 1 few at first, below 1 many (LaViDa)               |
    | `cosine`  | (1 - cos(pi t)) / 2: few at first and at last, many between (LaViDa)                    |
    | `maskgit` | sin(pi t / 2), so that cos(pi t / 2) of the places are masked after a share t (MaskGIT) |

    Args:
        schedule: one of SCHEDULES.
        places: of the block.
        steps: 1 to `places`.
        shift: s of `shift`, above 0.
    """
    if schedule == "linear":
        each, left = divmod(places, steps)
        return tuple(each + (step < left) for step in range(steps))
    curves: Mapping[str, Callable[[float], float]] = {
        "shift": partial(_shifted, shift),
        "cosine": _cosine,
        "maskgit": _maskgit,
    }
    return tuple(reversed(_along(curves[schedule], places, steps)))


def _shifted(shift: float, t: float) -> float:
    return shift * t / (1 + (shift - 1) * t)


def _cosine(t: float) -> float:
    return (1 - math.cos(math.pi * t)) / 2


def _maskgit(t: float) -> float:
    return math.sin(math.pi * t / 2)


def _along(curve: Callable[[float], float], places: int, steps: int) -> list[int]:
    # The small term keeps a whole number that came out as 5.999... whole.
    reached = [math.floor(curve(step / steps) * places + 1e-9) for step in range(steps + 1)]
    found = [max(b - a, 1) for a, b in pairwise(reached)]
    step = 0
    while sum(found) > places:
        if found[step % steps] > 1:
            found[step % steps] -= 1
        step += 1
    return found
