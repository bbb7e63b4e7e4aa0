"""The kinds of methods on models that denoise, masks or canvases, and of methods of denoising steps elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from espalier.harness.cost.flops import flops_block
from espalier.harness.decoding.diffusion.answer_flops import canvas_flops, canvas_of, run_flops
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
from espalier.harness.engine.engine_guards import closes_gaps
from espalier.harness.kinds.checkpoint_check import check_places
from espalier.harness.kinds.kind import Account, OpenMethod, ResolvedMethod
from espalier.harness.kinds.reducer import WHOLE, Reducer
from espalier.harness.kinds.sample_counts import position_means
from espalier.harness.kinds.signal_check import (
    check_acts,
    check_separators,
    check_signals,
    without_separators,
)
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.generation import CanvasSettings
from espalier.harness.specs.run_spec import AnswerRequest, RunSpec, Settled
from espalier.methods.base import TokenReducer
from espalier.methods.denoiser import as_denoiser
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.priors import Prior
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class Denoiser(Reducer):
    """Implements Kind for methods that drop tokens, on a model that denoises its answers."""

    untimed = "a denoised answer has no prefill and no decoding of single tokens; its steps are timed as a whole"

    def normalise(self, spec: Settled, method: TokenReducer) -> Settled:
        """Refuse settings of a prefill or of other loops; a method that acts nowhere gets the ratio 0."""
        name, facts = spec.method.name, spec.model.facts
        check_signals(spec.model, method, name, TokenReducer)
        refuse("masks", spec, method)
        refuse("denoised answers", spec, method)
        closes_gaps(spec.engine.positions, method, facts)  # raises what is refused
        check_acts(spec.budget, method, name, facts)
        if not method.all_sites(facts.tower.layers, facts.text.layers):
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
        denoiser, name = as_denoiser(method), type(method).__name__
        refuse("steps", spec, method, even=denoiser is None or denoiser.even, title=name)
        rows = 1 if spec.engine.batch_size == "auto" else int(spec.engine.batch_size)
        check_caches(how, spec.model, method, spec.engine.backend == "emulate", rows)
        facts, shape = spec.model.facts, (how.planned, how.prefix_cache, how.blocks)
        for budget in set(step_budgets(method, spec.budget, facts, *shape)):
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
        from espalier.harness.decoding.diffusion.denoising_loop import DenoisingGenerator
        from espalier.harness.engine.denoising_steps import DenoisingSession

        with DenoisingSession(
            adapter,
            method,
            spec.budget,
            seed=spec.seed,
            backend=spec.engine.backend,
            positions=spec.engine.positions,
            prior=prior,
            separators=spec.engine.separators,
        ) as session:
            yield OpenMethod(DenoisingGenerator(session, adapter), adapter)

    def prompt_reducer(self, method: TokenReducer) -> TokenReducer | None:
        """Return the method if it drops tokens once."""
        return method if method.in_one_prefill else None

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


class DenoisingOnly(Reducer):
    """Implements Kind for espalier.methods.denoiser.DenoisingReducer on a model that generates token by token.

    Such a method may act nowhere there; then the model answers with every token.
    """

    def normalise(self, spec: Settled, method: TokenReducer) -> Settled:
        """Refuse a method that needs denoising steps; one that acts nowhere gets the ratio 0."""
        refuse("denoising steps elsewhere", spec, method)
        return super().normalise(spec, NoReduction())

    def resolve(
        self, spec: RunSpec, method: TokenReducer, digests: Digests
    ) -> ResolvedMethod[TokenReducer]:
        """Check the run like one without a method."""
        super().resolve(spec, NoReduction(), digests)
        return ResolvedMethod(method)

    def open(
        self,
        spec: AnswerRequest,
        adapter: Adapter,
        _method: TokenReducer,
        prior: Prior | None = None,
    ) -> AbstractContextManager[OpenMethod]:
        """Answer with every token."""
        return super().open(spec, adapter, NoReduction(), prior)

    def prompt_reducer(self, _method: TokenReducer) -> TokenReducer | None:
        """Return None: it drops tokens at denoising steps."""
        return None


class CanvasReducer(Reducer):
    """Implements Kind for espalier.methods.base.TokenReducer: the prompt is reduced once, every step reads the rest."""

    untimed = (
        "answers on canvases take as many steps as their words need, with the method or without"
    )

    def normalise(self, spec: Settled, method: TokenReducer) -> Settled:
        """Check the settings of a run, as `Reducer` does.

        Raises:
            Refused: the method or the engine needs answers that are generated token by token.
        """
        refuse("denoised answers", spec, method)
        gaps = closes_gaps(spec.engine.positions, method, spec.model.facts)
        refuse("canvases", spec, method, gaps=gaps)
        return super().normalise(spec, method)

    def resolve(
        self, spec: RunSpec, method: TokenReducer, digests: Digests
    ) -> ResolvedMethod[TokenReducer]:
        """Check the settings of the answer too.

        Raises:
            UserError: from `CanvasSettings.of`.
            Refused: the benchmark fixes the length of answers, or the answer exceeds the model's positions.
        """
        refuse("answers on canvases", spec, method)
        canvas = canvas_of(spec.model.facts)
        check_places(spec, CanvasSettings.of(spec.generation, canvas.length).length)
        return super().resolve(spec, method, digests)

    @contextmanager
    def open(
        self,
        spec: AnswerRequest,
        adapter: Adapter,
        method: TokenReducer,
        prior: Prior | None = None,
    ) -> Iterator[OpenMethod]:
        """Open a session with the method, without paired timing."""
        with super().open(spec, adapter, method, prior) as opened:
            yield replace(opened, paired=None)

    def account(
        self, spec: AnswerRequest, method: TokenReducer, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens kept of each prompt, the FLOPs of whole runs, and steps."""
        account, facts = super().account(spec, method, records), spec.model.facts
        canvas = canvas_of(facts)
        runs = [record.canvases for record in records if record.canvases is not None]
        steps = [run["steps"] for run in runs]
        block = {
            "steps": fmean(map(sum, steps)),
            "length": fmean(len(counts) * canvas.length for counts in steps),
            "canvases": fmean(map(len, steps)),
            "ended_early": fmean(count < run["limit"] for run in runs for count in run["steps"]),
        }
        return replace(
            account,
            flops=flops_block(canvas_flops(facts, record) for record in records),
            extra={**account.extra, "canvas": block},
        )


DENOISER = Denoiser()
DENOISING_ONLY = DenoisingOnly()
CANVAS_REDUCER = CanvasReducer()


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
