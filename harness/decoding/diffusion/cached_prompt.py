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
from espalier.harness.errors import Refused
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
    if settings.prefix_cache:
        check_prefix_cache(model, method, emulate)
    if not settings.stores_sequence:
        return
    value = (
        "block_cache=true"
        if settings.block_cache
        else f"prompt_interval={settings.prompt_interval}"
    )
    sites = method.all_sites(model.facts.tower.layers, model.facts.text.layers)
    if as_denoiser(method) is not None and sites:
        raise Refused(
            f"generation.{value} leaves no states of visual tokens in most steps for {type(method).__name__} to act "
            "on; valid: null, or a method that acts once in a prefill, such as fastv"
        )
    if settings.block_cache and settings.drifts and rows > 1:
        cause = (
            f"schedule={settings.schedule}"
            if settings.threshold is None
            else f"threshold={settings.threshold:g}"
        )
        raise Refused(
            f"generation.{value} with generation.{cause}: answers of a batch start their "
            f"blocks at different steps; valid: engine.batch_size=1 (engine.batch_size={rows})"
        )


def check_prefix_cache(model: ModelSpec, method: TokenReducer, emulate: bool) -> None:
    """Refuse a cached prompt if the model was trained with another mask, or if the method cannot act on it.

    Raises:
        Refused: one of these.
    """
    setting = "generation.prefix_cache=true"
    diffusion = model.facts.diffusion
    if diffusion is None or not diffusion.prefix_cache:
        raise Refused(
            f"{setting} hides the answer from the prompt, and model={model.name!r} was not trained that way "
            "(model.facts.diffusion.prefix_cache=false); valid: false"
        )
    sites = method.all_sites(model.facts.tower.layers, model.facts.text.layers)
    merging = as_denoiser(method)
    if merging is None or not sites:
        return
    if not merging.merges_entries:
        raise Refused(
            f"{setting} leaves no states of visual tokens in a step for {type(method).__name__} to act on; valid: "
            "false, or a method that acts on a cached prompt, such as d3tom, or once in its own run, such as fastv"
        )
    if emulate:
        raise Refused(
            f"engine.backend='emulate' hides tokens by masks, and under {setting} {type(method).__name__} merges "
            "cache entries for real; valid: drop"
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
