"""What generation settings say of a denoised answer: its length, blocks and steps, and how places are unveiled."""

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


#: Settings of ordinary generation that a denoised answer cannot follow, and the values at which they say nothing.
_SILENT: Mapping[str, tuple[Any, ...]] = {
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
        block: places of a block; blocks are finished from left to right.
        steps: of the whole answer, the same number for each block.
        schedule: how a block's places are dealt out to its steps.
        shift: s of the schedule `shift`.
        temperature: of the draw of words; 0 takes the likeliest.
        prefix_cache: whether the prompt sees itself alone, is run once and kept.
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
        """Read generation settings; what is not said of block and steps is the length: one block, a word a step.

        Raises:
            UserError: settings that do not go together, or that only a model that says one token after another has.
        """
        said = {name: value for name, value in generation.items() if value is not None}
        for name, silent in _SILENT.items():
            if name in said and said[name] not in silent:
                raise UserError(
                    f"generation.{name}={said[name]!r} is of models that say one token after another; this one "
                    f"denoises its answers; valid: {silent[0]}"
                )
        length = int(said["max_new_tokens"])
        block, steps = said.get("block_length", length), said.get("steps", length)
        schedule = said.get("schedule", "linear")
        if schedule not in SCHEDULES:
            raise unknown_name("generation.schedule", str(schedule), SCHEDULES)
        found = cls(
            length,
            int(block),
            int(steps),
            str(schedule),
            float(said.get("shift", 3.0)),
            float(said.get("temperature", 0.0)) if said.get("do_sample", True) else 0.0,
            bool(said.get("prefix_cache", False)),
        )
        found._check()
        return found

    def _check(self) -> None:
        length, block, steps = self.length, self.block, self.steps
        if block > length or length % block:
            raise UserError(
                f"generation.max_new_tokens={length} is no multiple of generation.block_length={block}; valid: a "
                "length of whole blocks"
            )
        if steps > length:
            raise UserError(
                f"generation.steps={steps} is above generation.max_new_tokens={length}: each step unveils a place; "
                f"valid: 1 to {length}"
            )
        blocks = length // block
        if steps % blocks:
            raise UserError(
                f"generation.steps={steps} does not deal out evenly to {blocks} blocks (max_new_tokens={length}, "
                f"block_length={block}); valid: a multiple of {blocks}"
            )

    @property
    def reveals(self) -> tuple[int, ...]:
        """Places unveiled at each step of the whole answer."""
        blocks = self.length // self.block
        return blocks * counts(self.schedule, self.block, self.steps // blocks, self.shift)


def fitting_length(said: Mapping[str, Any]) -> int:
    """Return a length that goes with block and steps as said, so that all else can be checked before it is known."""
    steps = int(said.get("steps") or 1)
    block = said.get("block_length")
    return max(steps, DEFAULT_NEW_TOKENS) if block is None else steps * int(block)


def check_none(generation: Mapping[str, Any], model: str) -> None:
    """Raise UserError if settings of denoised answers are given to a model that says one token after another."""
    for name in DENOISING:
        if generation.get(name) is not None:
            raise UserError(
                f"generation.{name}={generation[name]!r} is of models that denoise their answers, and model={model!r} "
                "says one token after another; valid: null"
            )
