"""Figures of a row with denoised answers; docs/diffusion.md defines each of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.budget import Budget, BudgetMismatch
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import (
    Components,
    SampleFlops,
    cached_prompt_flops,
    head_flops,
    mlp_flops,
    projector_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.cost.paper_flops import PAPERS, counts_of, split_layer
from espalier.harness.cost.row_work import Work
from espalier.harness.cost.schedule import equivalent_tokens, frame_of
from espalier.harness.decoding.diffusion.cached_prompt import cached_flops
from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.methods.base import TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.record import SampleRecord


def diffusion_block(records: Sequence[SampleRecord]) -> dict[str, Any]:
    """Return the content of `extra.diffusion`.

    Values of single steps, as means over the samples, are included if all samples had the same number of steps.
    """
    denoisings = denoising_records(records)
    block: dict[str, Any] = {
        "path": " and ".join(sorted({denoising.path for denoising in denoisings})),
        "steps": fmean(len(denoising.reveals) for denoising in denoisings),
        "length": fmean(denoising.length for denoising in denoisings),
        "layer_average": fmean(fmean(denoising.entering) for denoising in denoisings),
        "layer_average_behind_first": fmean(
            fmean(denoising.entering[1:] or denoising.entering) for denoising in denoisings
        ),
    }
    even = len({len(denoising.reveals) for denoising in denoisings}) == 1
    block["per_step"] = (
        _per_step(denoisings, [denoising.visual for denoising in records]) if even else None
    )
    return block


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


def _per_step(
    denoisings: Sequence[DenoisingRecord], visual: Sequence[int]
) -> dict[str, list[float]]:
    """Return means over the samples, for each step; without a site, every visual token stays."""
    steps: dict[str, Sequence[Sequence[float]]] = {
        "reveals": [denoising.reveals for denoising in denoisings],
        "requested": [
            last_of(denoising.requested, n) for denoising, n in zip(denoisings, visual, strict=True)
        ],
        "kept": [
            last_of(denoising.kept, n) for denoising, n in zip(denoisings, visual, strict=True)
        ],
        "layer_average": [denoising.entering for denoising in denoisings],
    }
    return {
        name: [fmean(step) for step in zip(*samples, strict=True)]
        for name, samples in steps.items()
    }


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
    later_steps = denoising.kept[1:] or denoising.kept
    equivalents = [
        equivalent_tokens(method, facts, record.visual, text, kept) for kept in later_steps
    ]
    return {
        rule: fmean(getattr(tokens, rule) for tokens in equivalents)
        for rule in ("kept", "average", "flops")
    }


def run_flops(method: TokenReducer, facts: ModelFacts, record: SampleRecord) -> SampleFlops:
    """Count one sample's whole run: tower and projector once, decoder and head at every step.

    Inside a split layer the MLP has fewer tokens than the attention; of the papers only D3ToM counts that. Cached
    prompts are counted by `espalier.harness.decoding.diffusion.cached_prompt`.
    """
    (denoising,) = denoising_records([record])
    if denoising.prefix_cache:
        return cached_flops(method, facts, record, denoising)
    text, steps = record.text + denoising.length, len(denoising.kept)
    frame = frame_of(method, facts, record.visual, text)
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    entering = [frame.entering(kept) for kept in denoising.kept]
    blocks = [number for number, site in enumerate(sites) if site.where == "block"]
    halves = sum(
        mlp_flops(facts.text) * (record.visual - kept[number])
        for kept in denoising.kept
        for number in blocks
    )
    work, full = Work(*record.work), (record.visual,) * facts.text.layers
    head = sum(head_flops(facts, scored) for scored in denoising.scored)
    windows = denoising.windows or (0,) * steps
    few = denoising.parts or (0,) * steps

    def decoded(entering: Sequence[tuple[int, ...]]) -> int:
        return sum(
            cached_prompt_flops(facts, counts, text - window, window, part)
            if window
            else text_flops(facts, counts, text)
            for counts, window, part in zip(entering, windows, few, strict=True)
        )

    decoder = decoded(entering) - halves
    untouched = work.untouched()

    def printed(entering: Sequence[tuple[int, ...]]) -> dict[str, float]:
        passes = []
        for counts, window, part in zip(entering, windows, few, strict=True):
            keys = [visual + text for visual in counts]
            queries = [window, *[part or window] * (len(keys) - 1)] if window else keys
            passes.append(counts_of(facts.text, queries, keys))
        return {name: sum(count[name] for count in passes) for name in PAPERS}

    paper = printed(entering)
    paper["d3tom"] += sum(
        split_layer(facts.text, record.visual, kept[number])
        for kept in denoising.kept
        for number in blocks
    )

    def parts(work: Work, decoder: int) -> Components:
        projector = projector_flops(facts, work.units, work.reprojected)
        return Components(tower_flops(facts, work), projector, decoder, head)

    return SampleFlops(
        exact=parts(work, decoder),
        exact_full=parts(untouched, decoded([full] * steps)),
        paper=paper,
        paper_full=printed([full] * steps),
    )
