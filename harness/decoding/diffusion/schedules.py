"""Schedules: how many places of a block are unmasked at each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import pi

import torch
from torch import Tensor

LINEAR = "linear"

#: Names of the schedules.
SCHEDULES = (LINEAR, "shift", "cosine", "logit_normal", "maskgit")


def counts(schedule: str, places: int, steps: int, shift: float = 3.0) -> tuple[int, ...]:
    """Return the places unmasked at each of `steps` steps: at least one each, `places` in total.

    `linear` distributes them evenly, the remainder to the first steps. The others follow a curve sigma(t) on t = n /
    steps: differences of floor(sigma(t) places), each at least 1; any excess is subtracted one by one from the front,
    in rounds; and the result is reversed in time, so that a curve that rises early unmasks late. Curves are computed in
    single precision, as LaViDa's code does: its rounding decides where sigma(t) places is an integer.

    | schedule       | sigma(t)                                                                               |
    | -------------- | -------------------------------------------------------------------------------------- |
    | `shift`        | s t / (1 + (s - 1) t): with s above 1 few at first, below 1 many (LaViDa)               |
    | `cosine`       | (1 - cos(pi t)) / 2: few at first and at last, many between (LaViDa)                    |
    | `logit_normal` | Phi(log(t / (1 - t))), Phi of the standard normal distribution (LaViDa)                 |
    | `maskgit`      | sin(pi t / 2), so that cos(pi t / 2) of the places are masked after a share t (MaskGIT) |

    Args:
        schedule: one of SCHEDULES.
        places: of the block.
        steps: 1 to `places`.
        shift: s of `shift`, above 0.
    """
    if schedule == LINEAR:
        each, remainder = divmod(places, steps)
        return tuple(each + (step < remainder) for step in range(steps))
    curves: Mapping[str, Callable[[Tensor], Tensor]] = {
        "shift": partial(_shifted, shift),
        "cosine": lambda t: 1 - 0.5 * (1 + torch.cos(pi * t)),
        "logit_normal": lambda t: (
            0.5 * (1 + torch.erf(torch.log(t / (1 - t)) / torch.tensor(2.0).sqrt()))
        ),
        "maskgit": lambda t: torch.sin(pi * t / 2),
    }
    curve = curves[schedule](torch.linspace(0, 1, steps + 1))
    reached: list[int] = (curve * places).long().tolist()
    unmasked = [max(b - a, 1) for a, b in pairwise(reached)]
    step = 0
    while sum(unmasked) > places:
        if unmasked[step % steps] > 1:
            unmasked[step % steps] -= 1
        step += 1
    # Rounding may leave a curve short of 1 at its end.
    unmasked[-1] += places - sum(unmasked)
    return tuple(reversed(unmasked))


def _shifted(shift: float, t: Tensor) -> Tensor:
    return shift * t / (1 + (shift - 1) * t)
