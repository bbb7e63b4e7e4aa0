"""Schedules: how many places of a block are unmasked at each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import pi

import torch
from torch import Tensor

from espalier.harness.specs.generation import LINEAR, ORIGIN, TIMESTEPS


def counts(
    schedule: str, places: int, steps: int, shift: float = 3.0, eps: float = 1e-3
) -> tuple[int, ...]:
    """Return the places unmasked at each of at most `steps` steps: at least one each, `places` in total.

    `linear` distributes them evenly, the remainder to the first steps. `timesteps` is Dream's: from time t to s of
    `steps` equal intervals between 1 and `eps`, a share 1 - s / t of the masked places, rounded down, and the rest in
    the last step; steps that unmask nothing are left out. `origin` draws its counts (`drawn_counts`), on average those
    of `linear`. The others follow a curve sigma(t) on t = n / steps: differences of floor(sigma(t) places), each at
    least 1; any excess is subtracted one by one from the front, in rounds; and the result is reversed in time, so that
    a curve that rises early unmasks late. All is computed in single precision, as in LaViDa's code: its rounding
    decides where a product is an integer.

    | schedule       | sigma(t)                                                                               |
    | -------------- | -------------------------------------------------------------------------------------- |
    | `shift`        | s t / (1 + (s - 1) t): with s above 1 few at first, below 1 many (LaViDa)               |
    | `cosine`       | (1 - cos(pi t)) / 2: few at first and at last, many between (LaViDa)                    |
    | `logit_normal` | Phi(log(t / (1 - t))), Phi of the standard normal distribution (LaViDa)                 |
    | `maskgit`      | sin(pi t / 2), so that cos(pi t / 2) of the places are masked after a share t (MaskGIT) |

    Args:
        schedule: one of SCHEDULES.
        places: masked ones of the block.
        steps: more than `places` are as many as `places`, but for `timesteps`.
        shift: s of `shift`, above 0.
        eps: last time of `timesteps`, above 0.
    """
    if schedule == TIMESTEPS:
        return _timesteps(places, steps, eps)
    steps = min(steps, places)
    if schedule in (LINEAR, ORIGIN):
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


def drawn_counts(uniform: Tensor, steps: int, eps: float) -> tuple[int, ...]:
    """Return the places unmasked at each step that unmasks some, if each has a chance of its own (Dream's `origin`).

    A place that is masked at time t is unmasked before s with probability 1 - s / t, in the last step with 1: its step
    is the interval of times that a uniform number falls into.

    Args:
        uniform: (n,) a number in [0, 1] for each place.
        steps: of `timesteps`.
        eps: the last time.
    """
    times = torch.linspace(1, eps, steps + 1, dtype=uniform.dtype, device=uniform.device)[1:-1]
    numbers = (uniform.unsqueeze(1) <= times).sum(1)
    return tuple(count for count in torch.bincount(numbers).tolist() if count)


def _timesteps(places: int, steps: int, eps: float) -> tuple[int, ...]:
    times = torch.linspace(1, eps, steps + 1)
    unmasked: list[int] = []
    for before, after in pairwise(times[:-1]):
        unmasked.append(int((places - sum(unmasked)) * (1 - after / before)))
    unmasked.append(places - sum(unmasked))
    return tuple(count for count in unmasked if count)


def _shifted(shift: float, t: Tensor) -> Tensor:
    return shift * t / (1 + (shift - 1) * t)
