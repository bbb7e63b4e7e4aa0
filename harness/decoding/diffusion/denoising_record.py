"""The record of a denoised answer, counts of each step, and the figures of a row; docs/diffusion.md defines each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget, BudgetMismatch, equivalent_tokens
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.record import SampleRecord
from espalier.methods.base import TokenReducer


@dataclass(frozen=True)
class DenoisingRecord:
    """One sample's steps; the fields are stored in journals under these names.

    Attributes:
        length: places of the answer.
        reveals: places revealed at each step.
        requested: visual tokens to keep after each site, by the step's budget, for each step.
        kept: visual tokens actually kept.
        entering: visual tokens that entered a decoder layer, mean over the layers, for each step; with a cached prompt,
            those with entries that the answer's places attended to.
        prefix_cache: whether the prompt was run once and cached.
        scored: masked places with candidates at each step: the head runs for these. Older records: every place.
        planned: steps for which budgets were made; an answer may be complete before the last. 0: those that ran.
        blocks: of the answer.
        windows: places that ran at each step against stored keys and values; 0: the whole sequence. Empty: all whole.
        parts: those of them that ran in each layer but the first; 0: all. Empty: all at each step.
        says_first: whether the run of the prompt gave the first place its word.
    """

    length: int
    reveals: tuple[int, ...]
    requested: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    entering: tuple[float, ...]
    prefix_cache: bool = False
    scored: tuple[int, ...] = ()
    planned: int = 0
    blocks: int = 1
    windows: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    says_first: bool = False

    def __post_init__(self) -> None:
        """Complete what older records do not have."""
        object.__setattr__(self, "scored", self.scored or (self.length,) * len(self.reveals))
        object.__setattr__(self, "planned", self.planned or len(self.reveals))

    @property
    def path(self) -> str:
        """Name in a row of how the steps were run."""
        if any(self.windows):
            return "stored"
        return "prefix_cache" if self.prefix_cache else "recomputed"

    def entry(self) -> dict[str, Any]:
        """Return the form that a journal stores: lists, and nothing of ways that no step took."""
        entry: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        taken = {"windows": self.windows, "parts": any(self.parts), "says_first": self.says_first}
        return {name: value for name, value in entry.items() if taken.get(name, True)}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> DenoisingRecord:
        """Rebuild a record from a journal."""
        return cls(**{name: _tuples(value) for name, value in entry.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class DenoisedStep:
    """What a step did for each row of a batch.

    Attributes:
        records: of the step.
        scored: places that had candidates; 0 once a row is complete.
        reveals: places that got their word.
        ms: milliseconds of the batch.
        window: places that ran against a stored sequence, 0 for a whole one; None: no step of the answer does.
        part: those of them that ran in each layer but the first, 0 for all.
    """

    records: tuple[SampleRecord, ...]
    scored: Sequence[int]
    reveals: Sequence[int]
    ms: float
    window: int | None = None
    part: int = 0


def record_of(
    denoised: Sequence[DenoisedStep],
    row: int,
    settings: Denoising,
    new_tokens: int,
    vision_ms: float,
    cached: SampleRecord | None = None,
) -> SampleRecord:
    """Return the record of one sample from the records of its steps, up to the one that completes it.

    Entries about sites and layers are those of the last step. The time of decoding is the sum of all steps of the
    batch; the prefill's is that of the cached prompt, or zero without a cache.

    Args:
        denoised: the batch's steps.
        row: of the sample.
        settings: how the answer is denoised.
        new_tokens: of the answer, including its end token.
        vision_ms: milliseconds of the sample before the decoder.
        cached: the record of its prompt, if that was run once and cached.
    """
    ran = [step for step in denoised if step.scored[row]]
    steps = [step.records[row] for step in ran]
    step_ms = [step.ms / len(step.records) for step in denoised]
    last, steps_ms = steps[-1], sum(step_ms)
    origins = _on_host([step.origin for step in steps if step.origin is not None])
    prefill_times: Mapping[str, float] = {} if cached is None else cached.times_ms
    denoising = DenoisingRecord(
        settings.length,
        tuple(step.reveals[row] for step in ran),
        tuple(s.requested for s in steps),
        tuple(s.kept for s in steps),
        tuple(fmean(s.entering) for s in steps),
        cached is not None,
        tuple(step.scored[row] for step in ran),
        settings.planned,
        settings.blocks,
        tuple(step.window for step in ran if step.window is not None),
        tuple(step.part for step in ran),
        settings.says_first,
    )
    times = {
        "vision": vision_ms,
        "select": sum(step.times_ms["select"] for step in steps) + prefill_times.get("select", 0.0),
        "prefill": prefill_times.get("prefill", 0.0),
        "decode": steps_ms,
        "decode_per_token": steps_ms / settings.length,
        "first_step": step_ms[0],
        "later_step": fmean(step_ms[1:] or step_ms),
    }
    return replace(
        last,
        text=last.text - settings.length if cached is None else last.text,
        new_tokens=new_tokens,
        times_ms=times,
        shared=(),
        held=None if cached is None and not denoising.windows else last.held,
        denoising=denoising.entry(),
        origin=origins[-1] if origins else None,
        origins=origins,
    )


def _on_host(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return one-dimensional tensors of one device in host memory, read at once."""
    if not parts:
        return ()
    joined = torch.cat([part.to(parts[0].device) for part in parts]).cpu()
    return tuple(joined.split([len(part) for part in parts]))


def diffusion_block(records: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return the content of `extra.diffusion`.

    Values of single steps, as means over the samples, are included if all samples had the same number of steps.
    """
    denoisings = denoising_records(records)
    even = len({len(denoising.reveals) for denoising in denoisings}) == 1
    pairs = [(run, record.visual) for run, record in zip(denoisings, records, strict=True)]
    steps: dict[str, list[Sequence[float]]] = {
        "reveals": [run.reveals for run in denoisings],
        "requested": [last_of(run.requested, visual) for run, visual in pairs],
        "kept": [last_of(run.kept, visual) for run, visual in pairs],
        "layer_average": [run.entering for run in denoisings],
    }
    per_step = {
        name: [fmean(step) for step in zip(*samples, strict=even)]
        for name, samples in steps.items()
    }
    return {
        "path": " and ".join(sorted({denoising.path for denoising in denoisings})),
        "steps": fmean(len(denoising.reveals) for denoising in denoisings),
        "length": fmean(denoising.length for denoising in denoisings),
        "layer_average": fmean(fmean(denoising.entering) for denoising in denoisings),
        "layer_average_behind_first": fmean(
            fmean(denoising.entering[1:] or denoising.entering) for denoising in denoisings
        ),
        "per_step": per_step if even else None,
    }


def step_times(records: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return median milliseconds of a sample's first step and of a later one, merging included, and which is longer.

    `longer` states whether later steps take longer than the first, where that kept every visual token and they do not;
    null otherwise, and where no time was measured.
    """
    times = [record.times_ms for record in records if "later_step" in record.times_ms]
    if not times:
        return {"first": None, "later": None, "longer": None}
    first, later = (median(entry[name] for entry in times) for name in ("first_step", "later_step"))
    kept = [
        (last_of(denoising.kept, record.visual), record.visual)
        for denoising, record in zip(denoising_records(records), records, strict=True)
    ]
    reduced_later = all(counts[0] == visual > counts[-1] for counts, visual in kept)
    return {"first": first, "later": later, "longer": later > first if reduced_later else None}


def last_of(counts: Sequence[Sequence[int]], visual: int) -> list[int]:
    """Return the count after the last site of each step; `visual` without a site."""
    return [step[-1] if step else visual for step in counts]


def denoising_records(records: Sequence[SampleRecord]) -> list[DenoisingRecord]:
    """Return the denoising records of samples.

    Raises:
        ValueError: an answer was not denoised.
    """
    entries = [record.denoising for record in records if record.denoising is not None]
    if len(entries) != len(records):
        raise ValueError(
            f"{len(records) - len(entries)} of {len(records)} answers were not denoised"
        )
    return [DenoisingRecord.from_entry(entry) for entry in entries]


def verify_steps(
    method: TokenReducer, budget: Budget, facts: ModelFacts, record: SampleRecord
) -> dict[str, float]:
    """Compare each step of one sample with its budget; return the equivalent tokens under each rule.

    They are means over the steps after the first, in which methods of denoising steps remove nothing.

    Raises:
        BudgetMismatch: a step kept a different number of tokens than its budget requested.
    """
    (denoising,) = denoising_records([record])
    text = record.text + (0 if denoising.prefix_cache else denoising.length)
    budgets = step_budgets(
        method, budget, facts, denoising.planned, denoising.prefix_cache, denoising.blocks
    )
    # An answer may be complete before its last step.
    for step, (kept, step_budget) in enumerate(zip(denoising.kept, budgets, strict=False)):
        requested = step_budget.keep(method, facts, record.visual, text)
        if not (method.adaptive or method.curved) and kept != requested:
            raise BudgetMismatch(
                f"sample {record.sample}, denoising step {step}: kept {kept}, requested {requested}"
            )
    equivalents = [
        equivalent_tokens(method, facts, record.visual, text, kept)
        for kept in denoising.kept[1:] or denoising.kept
    ]
    return {
        rule: fmean(getattr(tokens, rule) for tokens in equivalents)
        for rule in ("kept", "average", "flops")
    }
