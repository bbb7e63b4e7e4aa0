"""The figures of a row whose answers were denoised; docs/diffusion.md defines each of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.budget import Budget, BudgetMismatch
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import (
    Components,
    SampleFlops,
    head_flops,
    mlp_flops,
    projector_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.cost.paper_flops import PAPERS, counts_of, split_layer
from espalier.harness.cost.row_work import Work
from espalier.harness.cost.schedule import achieved, frame_of
from espalier.harness.decoding.diffusion.cached_prompt import cached_flops
from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.methods.base import TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.record import Record


def diffusion_block(records: Sequence[Record]) -> dict[str, Any]:
    """Return what `extra.diffusion` holds.

    Values of single steps are there where all samples had equally many: means over the samples.
    """
    told = steps_of(records)
    found: dict[str, Any] = {
        "path": " and ".join(sorted({one.path for one in told})),
        "steps": fmean(len(one.reveals) for one in told),
        "length": fmean(one.length for one in told),
        "layer_average": fmean(fmean(one.entering) for one in told),
        "layer_average_behind_first": fmean(
            fmean(one.entering[1:] or one.entering) for one in told
        ),
    }
    even = len({len(one.reveals) for one in told}) == 1
    found["per_step"] = _per_step(told, [one.visual for one in records]) if even else None
    return found


def _per_step(told: Sequence[DenoisingRecord], visual: Sequence[int]) -> dict[str, list[float]]:
    """Return means over the samples, for each step; without a site, every visual token stays."""
    steps: dict[str, Sequence[Sequence[float]]] = {
        "reveals": [one.reveals for one in told],
        "requested": [last_of(one.requested, n) for one, n in zip(told, visual, strict=True)],
        "kept": [last_of(one.kept, n) for one, n in zip(told, visual, strict=True)],
        "layer_average": [one.entering for one in told],
    }
    return {
        name: [fmean(step) for step in zip(*samples, strict=True)]
        for name, samples in steps.items()
    }


def last_of(counts: Sequence[Sequence[int]], visual: int) -> list[int]:
    """Return the count behind the last site of each step; `visual` where there is none."""
    return [step[-1] if step else visual for step in counts]


def steps_of(records: Sequence[Record]) -> list[DenoisingRecord]:
    """Return what the records say of their steps.

    Raises:
        ValueError: an answer was not denoised.
    """
    found = [one.denoising for one in records if one.denoising is not None]
    if len(found) != len(records):
        raise ValueError(f"{len(records) - len(found)} of {len(records)} answers were not denoised")
    return [DenoisingRecord.from_entry(one) for one in found]


def verified(
    method: TokenReducer, budget: Budget, facts: ModelFacts, record: Record
) -> dict[str, float]:
    """Compare each step of one sample with its budget; return the equivalent tokens under each rule.

    They are means over the steps behind the first, in which methods of denoising steps remove nothing.

    Raises:
        BudgetMismatch: a step kept another number of tokens than its budget asked for.
    """
    (told,) = steps_of([record])
    text = record.text + (0 if told.prefix_cache else told.length)
    budgets = step_budgets(method, budget, facts, len(told.kept), told.prefix_cache)
    for step, (kept, own) in enumerate(zip(told.kept, budgets, strict=True)):
        asked = own.keep(method, facts, record.visual, text)
        if not method.adaptive and kept != asked:
            raise BudgetMismatch(
                f"sample {record.sample}, denoising step {step}: kept {kept}, requested {asked}"
            )
    behind = told.kept[1:] or told.kept
    found = [achieved(method, facts, record.visual, text, kept) for kept in behind]
    return {
        rule: fmean(getattr(one, rule) for one in found) for rule in ("kept", "average", "flops")
    }


def run_flops(method: TokenReducer, facts: ModelFacts, record: Record) -> SampleFlops:
    """Count one sample's whole run: tower and projector once, decoder and head at every step.

    Inside a layer that runs in halves the MLP has fewer tokens than the attention; of the papers D3ToM alone says so. A
    cached prompt is counted by `espalier.harness.decoding.diffusion.cached_prompt`.
    """
    (told,) = steps_of([record])
    if told.prefix_cache:
        return cached_flops(method, facts, record, told)
    text, steps = record.text + told.length, len(told.kept)
    frame = frame_of(method, facts, record.visual, text)
    sites = method.all_sites(facts.tower.layers, facts.text.layers)
    entering = [frame.entering(kept) for kept in told.kept]
    blocks = [number for number, site in enumerate(sites) if site.where == "block"]
    halves = sum(
        mlp_flops(facts.text) * (record.visual - kept[number])
        for kept in told.kept
        for number in blocks
    )
    work, full = Work(*record.work), (record.visual,) * facts.text.layers
    head = steps * head_flops(facts, told.length)
    decoder = sum(text_flops(facts, counts, text) for counts in entering) - halves
    untouched = work.untouched()
    passes = [counts_of(facts.text, [visual + text for visual in counts]) for counts in entering]
    paper = {name: sum(one[name] for one in passes) for name in PAPERS}
    paper["d3tom"] += sum(
        split_layer(facts.text, record.visual, kept[number])
        for kept in told.kept
        for number in blocks
    )
    whole = counts_of(facts.text, [visual + text for visual in full])

    def parts(work: Work, decoder: int) -> Components:
        projector = projector_flops(facts, work.units, work.reprojected)
        return Components(tower_flops(facts, work), projector, decoder, head)

    return SampleFlops(
        exact=parts(work, decoder),
        exact_full=parts(untouched, steps * text_flops(facts, full, text)),
        paper=paper,
        paper_full={name: steps * count for name, count in whole.items()},
    )
