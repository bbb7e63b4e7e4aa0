"""The kinds of methods that drop tokens at each denoising step of a diffusion model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.flops import flops_block
from espalier.harness.decoding.diffusion.answer_flops import run_flops
from espalier.harness.decoding.diffusion.denoising_record import (
    DenoisingRecord,
    denoising_records,
    diffusion_block,
    last_of,
    step_times,
    verify_steps,
)
from espalier.harness.decoding.diffusion.denoising_settings import Denoising, check_caches
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.layer_inputs import closes_gaps
from espalier.harness.errors import Refused
from espalier.harness.kinds.checks.length_check import check_places
from espalier.harness.kinds.checks.separator_check import check_separators, without_separators
from espalier.harness.kinds.checks.signal_check import check_acts, check_signals
from espalier.harness.kinds.identity import answering_settings, identity_of
from espalier.harness.kinds.kind import Account, Identity, OpenMethod, ResolvedMethod
from espalier.harness.kinds.reducer import REDUCER, WHOLE
from espalier.harness.kinds.sample_counts import position_means
from espalier.harness.specs.run_spec import AnswerRequest, RunSpec, Settled
from espalier.methods.base import TokenReducer
from espalier.methods.denoiser import DenoisingReducer, as_denoiser
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts import Prior
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class Denoiser:
    """Implements Kind for methods that drop tokens, on a model that denoises its answers."""

    def normalise(self, spec: Settled, method: TokenReducer) -> Settled:
        """Refuse settings of a prefill or of other loops; a method that acts nowhere gets the ratio 0."""
        model, name, facts = spec.model, spec.method.name, spec.model.facts
        if facts.rotary_axes > 1 or facts.deepstack:
            raise Refused(
                f"model={model.name!r} denoises, and its positions have several axes or its tower feeds the decoder's "
                "first layers, which denoising steps do not support; valid: model.facts.rotary_axes=1, no deepstack"
            )
        check_signals(model, method, name, TokenReducer)
        depth = facts.text.layers
        if method.tower_sites(facts.tower.layers) or method.decode_site(depth) is not None:
            raise Refused(
                f"method={name!r} acts inside the vision tower or in the steps of a cache, and model={model.name!r} "
                "denoises its answers; valid: d3tom, or a method that drops tokens after the projector, such as fastv"
            )
        if method.shrinks_pictures:
            raise Refused(
                f"method={name!r} changes the pictures, and model={model.name!r} denoises from a stored prompt; valid: "
                "uniform or pooled"
            )
        if spec.budget.rule == "kv_bytes":
            raise Refused(
                f"budget='kv_bytes': model={model.name!r} denoises without a cache; valid: kept, average, flops"
            )
        if spec.engine.rescore:
            raise Refused(
                f"engine.rescore=true judges answers one token after another, and model={model.name!r} denoises them; "
                "valid: false"
            )
        if spec.engine.decode != "loop":
            raise Refused(
                f"engine.decode={spec.engine.decode!r} generates one token after another, and model={model.name!r} "
                "denoises its answers; valid: loop"
            )
        closes_gaps(spec.engine.positions, method, facts)  # raises what is refused
        check_acts(spec.budget, method, name, facts)
        if not method.all_sites(facts.tower.layers, depth):
            return without_separators(replace(spec, budget=WHOLE))
        denoiser = as_denoiser(method)
        if denoiser is not None and denoiser.takes_newlines:
            spec = replace(spec, engine=replace(spec.engine, separators="candidates"))
        check_separators(spec, method)
        return spec

    def resolve(
        self, spec: RunSpec, method: TokenReducer, digests: Digests
    ) -> ResolvedMethod[TokenReducer]:
        """Check settings of the answer and the budget of each step."""
        diffusion = spec.model.facts.diffusion
        assert diffusion is not None  # only then this kind is chosen
        how = Denoising.of(spec.generation, diffusion)
        check_places(spec, how.length)
        if how.threshold is not None:
            _check_even(method)
        rows = 1 if spec.engine.batch_size == "auto" else int(spec.engine.batch_size)
        check_caches(how, spec.model, method, spec.engine.backend == "emulate", rows)
        facts = spec.model.facts
        budgets = step_budgets(
            method, spec.budget, facts, how.planned, how.prefix_cache, how.blocks
        )
        for budget in set(budgets):
            budget.check(method, facts)
        return ResolvedMethod(method)

    @contextmanager
    def open(
        self,
        spec: AnswerRequest,
        adapter: Adapter,
        method: TokenReducer,
        prior: Prior | None = None,
    ) -> Iterator[OpenMethod]:
        """Open a session for denoising steps."""
        # transformers takes seconds to import, and checks and readers of rows do not need it.
        from espalier.harness.decoding.diffusion.denoising_loop import denoising

        with denoising(spec, adapter, method, spec.budget, prior) as denoiser:
            yield OpenMethod(denoiser, adapter)

    def prompt_reducer(self, method: TokenReducer) -> TokenReducer | None:
        """Return the method if it drops tokens once."""
        return method if method.in_one_prefill else None

    def why_no_paired_timing(self, spec: AnswerRequest, method: TokenReducer) -> str | None:
        """Return that whole runs are timed: a step is not a prefill."""
        del spec, method
        return "a denoised answer has no prefill and no decoding of single tokens; its steps are timed as a whole"

    def account(
        self, spec: AnswerRequest, method: TokenReducer, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens that the steps keep, and the FLOPs of whole runs."""
        facts, runs = spec.model.facts, denoising_records(records)
        achieved = [verify_steps(method, spec.budget, facts, record) for record in records]
        pairs = list(zip(runs, records, strict=True))
        sites = method.all_sites(facts.tower.layers, facts.text.layers)
        kept = [_mean_after_last_site(run.kept, r.visual) for run, r in pairs]
        return Account(
            tokens={
                "visual": fmean(record.visual for record in records),
                "requested_keep": fmean(
                    _mean_after_last_site(run.requested, r.visual) for run, r in pairs
                ),
                "kept_final": fmean(kept),
                "layer_average": fmean(fmean(run.entering) for run in runs),
                "kv_entries": fmean(record.kv_entries for record in records),
                **position_means(records, kept),
            },
            flops=flops_block(run_flops(method, facts, record) for record in records),
            kv_bytes=fmean(record.kv_bytes for record in records),
            extra={
                "sites": [
                    {"where": site.where, "layer": site.layer, **_means(runs, number)}
                    for number, site in enumerate(sites)
                ],
                "adaptive": method.adaptive,
                "decode_attended": None,
                "spare": None,
                "acceptance": None,
                "speculative": None,
                "diffusion": {
                    **diffusion_block(records),
                    "step_ms": step_times(records),
                },
                "achieved": {rule: fmean(run[rule] for run in achieved) for rule in achieved[0]},
            },
        )

    def identity(self, spec: AnswerRequest, method: TokenReducer) -> Identity:
        """Return the settings of one model."""
        facts = spec.model.facts
        acts = bool(method.all_sites(facts.tower.layers, facts.text.layers))
        return identity_of(spec, method, answering_settings(spec.engine, acts))


class DenoisingOnly:
    """Implements Kind for espalier.methods.denoiser.DenoisingReducer on a model that generates token by token.

    Such a method may act nowhere there; then the model answers with every token.
    """

    def normalise(self, spec: Settled, method: DenoisingReducer) -> Settled:
        """Refuse a method that needs denoising steps; one that acts nowhere gets the ratio 0."""
        facts = spec.model.facts
        if method.read_sites(facts.tower.layers, facts.text.layers):
            raise Refused(
                f"method={spec.method.name!r} drops tokens at denoising steps, and model={spec.model.name!r} decodes "
                "one token after another; valid: a method that drops them in the prefill, such as fastv"
            )
        return REDUCER.normalise(spec, NoReduction())

    def resolve(
        self, spec: RunSpec, method: DenoisingReducer, digests: Digests
    ) -> ResolvedMethod[DenoisingReducer]:
        """Check the run like one without a method."""
        REDUCER.resolve(spec, NoReduction(), digests)
        return ResolvedMethod(method)

    def open(
        self,
        spec: AnswerRequest,
        adapter: Adapter,
        method: DenoisingReducer,
        prior: Prior | None = None,
    ) -> Any:
        """Answer with every token."""
        del method
        return REDUCER.open(spec, adapter, NoReduction(), prior)

    def prompt_reducer(self, method: DenoisingReducer) -> TokenReducer | None:
        """Return None: it drops tokens at denoising steps."""
        del method
        return None

    def why_no_paired_timing(self, spec: AnswerRequest, method: DenoisingReducer) -> str | None:
        """Return a reason, since nothing is dropped."""
        del method
        return REDUCER.why_no_paired_timing(spec, NoReduction())

    def account(
        self, spec: AnswerRequest, method: DenoisingReducer, records: Sequence[SampleRecord]
    ) -> Account:
        """Count whole prompts."""
        del method
        return REDUCER.account(spec, NoReduction(), records)

    def identity(self, spec: AnswerRequest, method: DenoisingReducer) -> Identity:
        """Return the settings of one model without a policy for positions, since no token leaves the prompt."""
        return identity_of(spec, method, answering_settings(spec.engine, acts=False))


DENOISER = Denoiser()
DENOISING_ONLY = DenoisingOnly()


def _check_even(method: TokenReducer) -> None:
    """Refuse shares that follow the number of steps, which confidence decides."""
    denoiser = as_denoiser(method)
    if denoiser is not None and not denoiser.even:
        raise Refused(
            f"generation.threshold leaves the number of steps open, and the shares of {type(method).__name__} follow "
            "it; valid: null, or a method with equal shares, such as d3tom"
        )


def _mean_after_last_site(counts: Sequence[Sequence[int]], visual: int) -> float:
    """Return the mean number of tokens after the last site, over the steps after the first."""
    return fmean(last_of(counts[1:] or counts, visual))


def _means(runs: Sequence[DenoisingRecord], number: int) -> dict[str, float]:
    """Return the mean requested and kept tokens of one site, over samples and the steps after the first."""

    def mean(steps: Iterable[Sequence[Sequence[int]]]) -> float:
        return fmean(
            fmean(step[number] for step in steps_of_run[1:] or steps_of_run)
            for steps_of_run in steps
        )

    return {
        "requested": mean(run.requested for run in runs),
        "kept": mean(run.kept for run in runs),
    }
