"""Answers with a cached prompt or a stored sequence: for which models and methods, and FLOPs with a cached prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import (
    Components,
    SampleFlops,
    cached_prompt_flops,
    head_flops,
    projector_flops,
    text_flops,
    tower_flops,
)
from espalier.harness.cost.paper_flops import PAPERS, counts_of
from espalier.harness.cost.row_work import Work
from espalier.harness.cost.schedule import frame_of
from espalier.harness.decoding.diffusion.denoising_record import DenoisingRecord
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import ModelSpec
from espalier.methods.base import TokenReducer
from espalier.methods.denoiser import as_denoiser

if TYPE_CHECKING:
    from espalier.harness.engine.record import SampleRecord


def check_caches(
    settings: Denoising, model: ModelSpec, method: TokenReducer, emulate: bool, rows: int
) -> None:
    """Refuse caches of an answer that do not fit the model, the method or the rows of a batch.

    Raises:
        Refused: one of these.
    """
    sites = method.all_sites(model.facts.tower.layers, model.facts.text.layers)
    refuse(
        "caches of denoising",
        {
            "model": model,
            "generation": settings,
            "engine": {"backend": "emulate" if emulate else "drop"},
        },
        denoiser=as_denoiser(method) if sites else None,
        title=type(method).__name__,
        rows=rows,
    )


def cached_flops(
    method: TokenReducer, facts: ModelFacts, record: SampleRecord, denoising: DenoisingRecord
) -> SampleFlops:
    """Count one sample's whole run: tower, projector and prompt once, the answer's places and the head at each step.

    A method that acts on every prefill shortens the prompt's own run; one that acts on denoising steps shortens the
    entries that places attend to.
    """
    frame = frame_of(method, facts, record.visual, record.text)
    steps, full = len(denoising.kept), (record.visual,) * facts.text.layers
    entering = [frame.entering(kept) for kept in denoising.kept]
    prompt = entering[0] if as_denoiser(method) is None else full
    text, places = record.text, denoising.length
    head = sum(head_flops(facts, scored) for scored in (denoising.says_first, *denoising.scored))

    def parts(work: Work, prompt: tuple[int, ...], entries: list[tuple[int, ...]]) -> Components:
        decoder = text_flops(facts, prompt, text, causal=False)
        decoder += sum(cached_prompt_flops(facts, counts, text, places) for counts in entries)
        projector = projector_flops(facts, work.units, work.reprojected)
        return Components(tower_flops(facts, work), projector, decoder, head)

    def paper(prompt: tuple[int, ...], entries: list[tuple[int, ...]]) -> dict[str, float]:
        passes = [counts_of(facts.text, [visual + text for visual in prompt])]
        for counts in entries:
            keys = [visual + text + places for visual in counts]
            passes.append(counts_of(facts.text, [places] * len(counts), keys))
        return {name: sum(count[name] for count in passes) for name in PAPERS}

    work = Work(*record.work)
    return SampleFlops(
        exact=parts(work, prompt, entering),
        exact_full=parts(work.untouched(), full, [full] * steps),
        paper=paper(prompt, entering),
        paper_full=paper(full, [full] * steps),
    )
