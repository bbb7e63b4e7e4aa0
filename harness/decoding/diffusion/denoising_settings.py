"""Generation settings of a denoised answer: length, blocks and schedule, how words are chosen and where it stops."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from math import pi
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.errors import UserError
from espalier.harness.settings import read_value
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.generation import (
    ENDINGS,
    GENERATION,
    LINEAR,
    MASKS,
    ORIGIN,
    REMASKING,
    TIMESTEPS,
    check_answers,
)
from espalier.harness.specs.run_spec import ModelSpec
from espalier.methods.base import TokenReducer
from espalier.methods.denoiser import as_denoiser

#: Masked places in a text to be filled: one, or as many as stated.
MARK = re.compile(r"<mask(?::([1-9]\d*))?>")


@dataclass(frozen=True)
class Denoising:
    """How an answer is denoised.

    Attributes:
        length: places of the answer (`max_new_tokens`); of a text to be filled at least its masked ones, until
            `starting_from` has its tokens.
        block: places of a block; blocks are completed from left to right.
        steps: of the whole answer, the same number for each block; with a threshold, the most there can be.
        schedule: how a block's places are distributed over its steps.
        shift: s of the schedule `shift`.
        temperature: of the draw of words; 0 takes the likeliest.
        prefix_cache: whether the prompt attends only to itself and is run once and cached.
        remasking: one of REMASKING.
        stop: one of ENDINGS.
        stop_words: texts that stop an answer besides the end tokens, if it freezes.
        top_k: words that are drawn from, the likeliest; None: all.
        top_p: share of the probability that is drawn from, the likeliest words; None: all of it.
        threshold: confidence from which on places are unmasked together, at least one a step; None: by the schedule.
        block_cache: whether the whole sequence runs only when a block starts, and then the block's places against its
            keys and values (the dual cache of Fast-dLLM).
        prompt_interval: steps from one run of the whole sequence to the next, between which the answer's places run
            against its keys and values (dLLM-Cache); None: every step.
        generation_interval: steps from one run of all the answer's places to the next, between which only those with
            the most changed values run (dLLM-Cache); None: every step.
        transfer_ratio: share of the answer's places that run in between, rounded down.
        eps: last time of the schedules `timesteps` and `origin`.
        alg_temp: above 0, places are drawn by their confidence over this temperature (Dream); 0 takes the highest.
        infill: text of the answer with marks (`MARK`) for the places to be filled; None: all places are masked.
        n_preset: places of the first block that have their word before the first step.
        says_first: whether the first of them has the word that a cached prompt predicts.
    """

    length: int
    block: int
    steps: int
    schedule: str = LINEAR
    shift: float = 3.0
    temperature: float = 0.0
    prefix_cache: bool = False
    remasking: str = REMASKING[0]
    stop: str = ENDINGS[0]
    stop_words: tuple[str, ...] = ()
    top_k: int | None = None
    top_p: float | None = None
    threshold: float | None = None
    block_cache: bool = False
    prompt_interval: int | None = None
    generation_interval: int | None = None
    transfer_ratio: float = 0.25
    eps: float = 1e-3
    alg_temp: float = 0.0
    infill: str | None = None
    n_preset: int = 0
    says_first: bool = False

    @property
    def draws(self) -> bool:
        """Whether words or the order of places are drawn."""
        return self.temperature > 0 or self.alg_temp > 0 or self.remasking == "random"

    @classmethod
    def of(cls, generation: Mapping[str, Any], facts: DiffusionFacts) -> Denoising:
        """Read generation settings.

        The length defaults to the model's own, a block to the length, at most the model's; each step unmasks a word.

        Raises:
            UserError: settings that do not fit together, or that a denoised answer does not have.
        """
        check_answers(generation, MASKS)
        settings = {name: value for name, value in generation.items() if value is not None}
        infill = settings.get("infill")
        if infill is not None:
            # The text sets its length and is one block; an end token does not cut what follows it.
            settings["max_new_tokens"] = settings["block_length"] = _masked(infill)
            settings.setdefault("stop", "none")
        length = int(settings.get("max_new_tokens", facts.length))
        block = int(settings.get("block_length", min(length, facts.block or length)))
        refuse(
            "steps of denoising",
            {"generation": {**settings, "max_new_tokens": length}},
            length=length,
            block=block,
            of="generation.max_new_tokens" if infill is None else "the places to fill",
        )
        names = {field.name for field in fields(cls)} & settings.keys()
        stated: dict[str, Any] = {
            name: read_value(f"generation.{name}", settings[name], GENERATION[name].hint)
            for name in names
        }
        words, draws = settings.get("stop_words", ()), settings.get("do_sample")
        heat = settings.get("temperature", 1.0 if draws else 0.0)
        steps = int(settings.get("steps", length))
        if "step_ratio" in settings:
            steps = length // block * int(block * settings["step_ratio"])
        stated |= {
            "steps": steps,
            "temperature": 0.0 if draws is False else float(heat),
            "stop_words": (words,) if isinstance(words, str) else tuple(words),
            # Zero is none of them.
            **{
                name: settings.get(name) or None
                for name in ("top_k", "prompt_interval", "generation_interval")
            },
        }
        denoising = cls(length, block, **stated)
        stated_settings = {**settings, "remasking": denoising.remasking}
        refuse("denoising settings", {"generation": stated_settings}, how=denoising)
        return denoising.starting_from([facts.mask_id] * length, facts)

    def starting_from(self, ids: Sequence[int], facts: DiffusionFacts) -> Denoising:
        """Return the settings of an answer with these tokens before its first step, masks where there is none.

        If predictions are shifted, a cached prompt gives the first place its word before any step, unless no other
        place would be left.
        """
        length, masked = len(ids), ids.count(facts.mask_id)
        is_said = facts.shifted and self.prefix_cache and ids[0] == facts.mask_id and masked > 1
        block = length if self.infill is not None else self.block
        n_preset = length - masked + is_said
        return replace(self, length=length, block=block, n_preset=n_preset, says_first=is_said)

    @property
    def part(self) -> int:
        """Places that run in each layer but the first between two runs of the whole answer."""
        return int(self.length * self.transfer_ratio)

    @property
    def drifts(self) -> bool:
        """Whether answers of a batch take different numbers of steps for a block."""
        return self.threshold is not None or self.schedule == ORIGIN

    @property
    def stores_sequence(self) -> bool:
        """Whether some steps run places of the answer against keys and values of a former step's whole sequence."""
        return self.block_cache or self.prompt_interval is not None

    def window(self, block: int) -> range:
        """Return the places that run in steps between whole sequences, in a block."""
        if self.block_cache:
            return range(block * self.block, (block + 1) * self.block)
        return range(self.length)

    def is_whole(self, step: int, next_block: bool) -> bool:
        """Return whether the whole sequence runs at a step after the first, which may be the first of a block."""
        if self.block_cache:
            return next_block
        return self.prompt_interval is None or step % self.prompt_interval == 0

    def is_partial(self, step: int) -> bool:
        """Return whether only the places with the most changed values run in a step between whole sequences."""
        return self.generation_interval is not None and step % self.generation_interval > 0

    @property
    def parts(self) -> tuple[int, ...]:
        """Places that run in each layer but the first at each step of the whole answer; 0: all of the window."""
        return tuple(self.part if self.is_partial(step) else 0 for step in range(self.planned))

    @property
    def windows(self) -> tuple[int, ...]:
        """Places that run at each step of the whole answer, if nothing stops it; 0: the whole sequence runs."""
        interval = self.planned // self.blocks if self.block_cache else self.prompt_interval or 1
        size = len(self.window(0))
        return tuple(size if step % interval else 0 for step in range(self.planned))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.length // self.block

    @property
    def block_steps(self) -> int:
        """Steps of a block, at most."""
        return self.steps // self.blocks

    def masked(self, block: int) -> int:
        """Return the places of a block that are masked before its first step."""
        return self.block if block else self.block - self.n_preset

    def reveals_of(self, block: int) -> tuple[int, ...]:
        """Return the places unmasked at each step of a block by the schedule."""
        masked = self.masked(block)
        return (
            counts(self.schedule, masked, self.block_steps, self.shift, self.eps) if masked else ()
        )

    @cached_property
    def reveals(self) -> tuple[int, ...]:
        """Places unmasked at each step of the whole answer, if nothing stops it."""
        return self.reveals_of(0) + (self.blocks - 1) * self.reveals_of(1)

    @property
    def planned(self) -> int:
        """Steps of the whole answer, if nothing stops it: none that unmasks nothing is run."""
        return len(self.reveals)

    @property
    def scored(self) -> tuple[int, ...]:
        """Places that are masked in the block before each step of the whole answer, if nothing stops it."""
        scored: list[int] = []
        for block in range(self.blocks):
            reveals = self.reveals_of(block)
            scored += [sum(reveals[step:]) for step in range(len(reveals))]
        return tuple(scored)


def _masked(infill: str) -> int:
    """Return the number of places to be filled in a text."""
    unmarked, masked = (
        MARK.sub("", infill),
        sum(int(number or 1) for number in MARK.findall(infill)),
    )
    if "<mask" in unmarked or not masked:
        fault = "a mark that is none" if masked else "no place to fill"
        raise UserError(
            f"generation.infill={infill!r} has {fault}; valid: a text with <mask> or <mask:N> where one or N tokens "
            "belong"
        )
    return masked


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
        "shift": lambda t: shift * t / (1 + (shift - 1) * t),
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


def check_caches(
    settings: Denoising, model: ModelSpec, method: TokenReducer, emulate: bool, rows: int
) -> None:
    """Refuse caches of an answer that do not fit the model, the method or the rows of a batch.

    Raises:
        Refused: one of these.
    """
    sites = method.all_sites(model.facts.tower.layers, model.facts.text.layers)
    denoiser = as_denoiser(method) if sites else None
    refuse(
        "caches of denoising",
        {
            "model": model,
            "generation": settings,
            "engine": {"backend": "emulate" if emulate else "drop"},
        },
        denoiser=denoiser,
        every=denoiser.every if denoiser else 1,
        title=type(method).__name__,
        rows=rows,
    )
