"""Generation settings of a denoised answer: its length, blocks and steps, and the schedule of revealed places."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.specs.generation import DEFAULT_NEW_TOKENS, DENOISING

#: Names of the schedules.
SCHEDULES = ("linear", "shift", "cosine", "maskgit")


def counts(schedule: str, places: int, steps: int, shift: float = 3.0) -> tuple[int, ...]:
    """Return the places revealed at each of `steps` steps: at least one each, `places` in total.

    `linear` distributes them evenly, the remainder to the first steps. The others follow a curve sigma(t) on t = n /
    steps: differences of floor(sigma(t) places), each at least 1; any excess is subtracted one by one from the front,
    in rounds; and the result is reversed in time, so that a curve that rises early reveals late.

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
        each, remainder = divmod(places, steps)
        return tuple(each + (step < remainder) for step in range(steps))
    curves: Mapping[str, Callable[[float], float]] = {
        "shift": partial(_shifted, shift),
        "cosine": _cosine,
        "maskgit": _maskgit,
    }
    return tuple(reversed(_reveals_along(curves[schedule], places, steps)))


def _shifted(shift: float, t: float) -> float:
    return shift * t / (1 + (shift - 1) * t)


def _cosine(t: float) -> float:
    return (1 - math.cos(math.pi * t)) / 2


def _maskgit(t: float) -> float:
    return math.sin(math.pi * t / 2)


def _reveals_along(curve: Callable[[float], float], places: int, steps: int) -> list[int]:
    # The small term corrects integers that were computed as 5.999...
    reached = [math.floor(curve(step / steps) * places + 1e-9) for step in range(steps + 1)]
    revealed = [max(b - a, 1) for a, b in pairwise(reached)]
    step = 0
    while sum(revealed) > places:
        if revealed[step % steps] > 1:
            revealed[step % steps] -= 1
        step += 1
    return revealed


#: Settings of ordinary generation that denoising does not support, and the values at which they have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True)
class Denoising:
    """How an answer is denoised.

    Attributes:
        length: places of the answer (`max_new_tokens`).
        block: places of a block; blocks are completed from left to right.
        steps: of the whole answer, the same number for each block.
        schedule: how a block's places are distributed over its steps.
        shift: s of the schedule `shift`.
        temperature: of the draw of words; 0 takes the likeliest.
        prefix_cache: whether the prompt attends only to itself and is run once and cached.
    """

    length: int
    block: int
    steps: int
    schedule: str = "linear"
    shift: float = 3.0
    temperature: float = 0.0
    prefix_cache: bool = False

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> Denoising:
        """Read generation settings; block and steps default to the length: one block, a word per step.

        Raises:
            UserError: settings that do not fit together, or that exist only for autoregressive models.
        """
        settings = {name: value for name, value in generation.items() if value is not None}
        for name, neutral in _NEUTRAL.items():
            if name in settings and settings[name] not in neutral:
                raise UserError(
                    f"generation.{name}={settings[name]!r} is for models that generate one token after another; this "
                    f"one denoises its answers; valid: {neutral[0]}"
                )
        length = int(settings["max_new_tokens"])
        block, steps = (
            settings.get("block_length", length),
            settings.get("steps", length),
        )
        schedule = settings.get("schedule", "linear")
        if schedule not in SCHEDULES:
            raise unknown_name("generation.schedule", str(schedule), SCHEDULES)
        denoising = cls(
            length,
            int(block),
            int(steps),
            str(schedule),
            float(settings.get("shift", 3.0)),
            float(settings.get("temperature", 0.0)) if settings.get("do_sample", True) else 0.0,
            bool(settings.get("prefix_cache", False)),
        )
        denoising._check()
        return denoising

    def _check(self) -> None:
        length, block, steps = self.length, self.block, self.steps
        if block > length or length % block:
            raise UserError(
                f"generation.max_new_tokens={length} is not a multiple of generation.block_length={block}; valid: a "
                "length of whole blocks"
            )
        if steps > length:
            raise UserError(
                f"generation.steps={steps} is above generation.max_new_tokens={length}: each step reveals a place; "
                f"valid: 1 to {length}"
            )
        blocks = length // block
        if steps % blocks:
            raise UserError(
                f"generation.steps={steps} is not divisible by {blocks} blocks (max_new_tokens={length}, "
                f"block_length={block}); valid: a multiple of {blocks}"
            )

    @property
    def reveals(self) -> tuple[int, ...]:
        """Places revealed at each step of the whole answer."""
        blocks = self.length // self.block
        return blocks * counts(self.schedule, self.block, self.steps // blocks, self.shift)


def fitting_length(generation: Mapping[str, Any]) -> int:
    """Return a length that is valid for block and steps, to check other settings before the length is known."""
    steps = int(generation.get("steps") or 1)
    block = generation.get("block_length")
    return max(steps, DEFAULT_NEW_TOKENS) if block is None else steps * int(block)


def refuse_denoising_settings(generation: Mapping[str, Any], model: str) -> None:
    """Raise UserError if settings of denoised answers are given to an autoregressive model."""
    for name in DENOISING:
        if generation.get(name) is not None:
            raise UserError(
                f"generation.{name}={generation[name]!r} is for models that denoise their answers, and model={model!r} "
                "generates one token after another; valid: null"
            )
