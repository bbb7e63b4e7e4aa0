"""Sides of the benchmark of denoising runs, with times of runs, steps, scores and merging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Any

from torch import Tensor

from espalier.harness.cost.bounds import Gain
from espalier.harness.cost.budget import Budget, frame_of
from espalier.harness.cost.flops import cached_prompt_flops, head_flops, text_flops
from espalier.harness.decoding.diffusion.answer_flops import run_flops
from espalier.harness.decoding.diffusion.denoising_loop import DenoisingGenerator
from espalier.harness.decoding.diffusion.denoising_record import denoising_records
from espalier.harness.engine.cached_steps import CachedPrompt
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import SampleRecord
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import RunSpec
from espalier.methods.base import TokenReducer
from espalier.methods.denoiser import as_denoiser

MS = 1e3
SAMPLE = "0"


@dataclass(frozen=True)
class Step:
    """One step: seconds of processor time, of wall time, and of wall time spent in the method."""

    spent: float
    wall: float
    method: float


@dataclass(frozen=True)
class Run:
    """One denoised answer: seconds of processor time, its steps, and its record."""

    spent: float
    steps: tuple[Step, ...]
    record: SampleRecord


class TimedSession(DenoisingSession):
    """A session that records the time of each step."""

    noted: list[Step]

    def denoise(
        self, prompt: Prompt, answer: AnswerState, samples: Sequence[str], budget: Budget
    ) -> tuple[Tensor, tuple[SampleRecord, ...]]:
        """Run one step, timed."""
        with self._noting() as records:
            result = super().denoise(prompt, answer, samples, budget)
            records += result[1]
        return result

    def denoise_cached(
        self,
        cached_prompt: CachedPrompt,
        answer: AnswerState,
        samples: Sequence[str],
        budget: Budget,
    ) -> tuple[Tensor, tuple[SampleRecord, ...]]:
        """Run one step after a cached prompt, timed."""
        with self._noting() as records:
            result = super().denoise_cached(cached_prompt, answer, samples, budget)
            records += result[1]
        return result

    @contextmanager
    def _noting(self) -> Iterator[list[SampleRecord]]:
        """Record the time of a block, which appends the rows' records to the list."""
        started, wall, records = process_time(), perf_counter(), list[SampleRecord]()
        yield records
        method = sum(record.times_ms["select"] for record in records) / MS
        self.noted.append(Step(process_time() - started, perf_counter() - wall, method))


@dataclass(frozen=True)
class DiffusionSide:
    """A method at a ratio on a model; complete runs are timed."""

    name: str
    adapter: Adapter
    method: TokenReducer
    budget: Budget

    @classmethod
    def of(cls, adapter: Adapter, spec: RunSpec) -> DiffusionSide:
        """Return the side of a run.

        Raises:
            UserError: its method drops no tokens.
        """
        method = build_method(spec.method.name, spec.method.params)
        if not isinstance(method, TokenReducer):
            raise UserError(f"method={spec.method.name!r} is not a token reducer")
        return cls(spec.method.name, adapter, method, spec.budget)

    @contextmanager
    def _session(self) -> Iterator[TimedSession]:
        session = TimedSession(self.adapter, self.method, self.budget)
        session.noted = []
        with session:
            yield session

    def prompt(self, inputs: Any) -> Prompt:
        """Run tower and projector."""
        with self._session() as session:
            return session.prompt(inputs)

    def run(self, prompt: Prompt, **generation: Any) -> Run:
        """Denoise an answer for each row of a prompt."""
        with self._session() as session:
            denoiser = DenoisingGenerator(session, self.adapter)
            samples = [f"{SAMPLE}{row}" if row else SAMPLE for row in range(prompt.layout.rows)]
            started = process_time()
            batch = denoiser.generate(prompt, samples, **generation)
            spent = process_time() - started
        return Run(spent, tuple(session.noted), batch.records[0])


@dataclass(frozen=True)
class DiffusionRow:
    """Times of one side, compared with the unreduced model.

    Attributes:
        name: name of the method.
        kept: share of the visual tokens after its layer.
        visual, tokens: visual and all tokens of the sequence, answer included.
        flops: share of the unreduced run's FLOPs, decoder and head.
        run_s: median processor seconds per run.
        step_ms: processor milliseconds per step after the first: the mean of those that share a choice, the median over
            these.
        loop_ms: time between steps, per step.
        method_share: share of a step after the first spent on scores, selection and merging, by the same rule.
        promised_step: share of an unreduced step's FLOPs that a step after the first has, decoder and head.
        gain: the unreduced run's time over this one's, geometric mean over the rounds with its 95 % interval.
    """

    name: str
    kept: float
    visual: int
    tokens: int
    flops: float
    run_s: float
    step_ms: float
    loop_ms: float
    method_share: float
    promised_step: float
    gain: Gain

    @property
    def time(self) -> float:
        """Share of the unreduced run's time."""
        return 1 / self.gain.ratio

    @property
    def reached(self) -> float:
        """Measured saving relative to the FLOP saving."""
        return (1 - self.time) / (1 - self.flops)

    @property
    def reached_interval(self) -> tuple[float, float] | None:
        """Its 95 % interval; None for a single round."""
        if self.gain.low is None or self.gain.high is None:
            return None
        low, high = ((1 - 1 / end) / (1 - self.flops) for end in (self.gain.low, self.gain.high))
        return low, high

    def entry(self) -> dict[str, Any]:
        """Return the JSON form."""
        unreduced = self.flops == 1
        return {
            **asdict(self),
            "time": self.time,
            "reached": None if unreduced else self.reached,
            "reached_interval": None if unreduced else self.reached_interval,
        }


def rows_of(
    sides: Sequence[DiffusionSide], inputs: Any, rounds: int, **generation: Any
) -> list[DiffusionRow]:
    """Denoise one prompt with all sides in turns, in changing order; the first side is the unreduced model.

    One untimed run of each comes first.
    """
    prompt = sides[0].prompt(inputs)
    for side in sides:
        side.run(prompt, **generation)
    runs_by_side: list[list[Run]] = [[] for _ in sides]
    for turn in range(rounds):
        for place in range(len(sides)):
            number = (place + turn) % len(sides)
            runs_by_side[number].append(sides[number].run(prompt, **generation))
    return [
        _row(side, runs, runs_by_side[0]) for side, runs in zip(sides, runs_by_side, strict=True)
    ]


def _row(side: DiffusionSide, runs: Sequence[Run], unreduced: Sequence[Run]) -> DiffusionRow:
    record = runs[0].record
    counted = run_flops(side.method, side.adapter.facts, record)
    assert record.denoising is not None  # always set by denoising
    last = record.denoising["kept"][-1]
    denoiser = as_denoiser(side.method)
    every = denoiser.every if denoiser else 1
    sharing = [
        run.steps[first : first + every]
        for run in runs
        for first in range(1, len(run.steps), every)
    ]
    between = [run.spent - sum(step.spent for step in run.steps) for run in runs]
    return DiffusionRow(
        name=side.name,
        kept=(last[-1] if last else record.visual) / record.visual,
        visual=record.visual,
        tokens=record.visual + record.text + record.denoising["length"],
        flops=counted.share_of_full,
        run_s=median(run.spent for run in runs),
        step_ms=MS * median(fmean(step.spent for step in steps) for steps in sharing),
        loop_ms=MS * median(between) / len(runs[0].steps),
        method_share=median(
            sum(step.method for step in steps) / sum(step.wall for step in steps)
            for steps in sharing
        ),
        promised_step=_promised_step(side, record),
        gain=Gain.of_pairs(
            [run.spent for run in unreduced], [run.spent for run in runs], 1 / counted.share_of_full
        ),
    )


def _promised_step(side: DiffusionSide, record: SampleRecord) -> float:
    """Return the share of an unreduced step's FLOPs that the last step has."""
    facts = side.adapter.facts
    (denoising,) = denoising_records([record])
    text = record.text + (0 if denoising.prefix_cache else denoising.length)
    frame, full = frame_of(side.method, facts, record.visual, text), (record.visual,)
    head = head_flops(facts, denoising.scored[-1])

    def cost(entering: tuple[int, ...]) -> int:
        if denoising.prefix_cache:
            return head + cached_prompt_flops(facts, entering, text, denoising.length)
        return head + text_flops(facts, entering, text)

    return cost(frame.entering(denoising.kept[-1])) / cost(full * facts.text.layers)
