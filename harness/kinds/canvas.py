"""The kind of reducers on a model that denoises canvases of random words against the cache of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from espalier.harness.cost.flops import flops_block
from espalier.harness.decoding.diffusion.answer_flops import canvas_flops, canvas_of
from espalier.harness.engine.layer_inputs import closes_gaps
from espalier.harness.errors import Refused
from espalier.harness.kinds.checks.length_check import check_places
from espalier.harness.kinds.kind import Account, OpenMethod, ResolvedMethod
from espalier.harness.kinds.reducer import Reducer
from espalier.harness.specs.canvas import CanvasSettings
from espalier.harness.specs.run_spec import AnswerRequest, RunSpec, Settled
from espalier.methods.base import TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts import Prior
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class CanvasReducer(Reducer):
    """Implements Kind for espalier.methods.base.TokenReducer: the prompt is reduced once, every step reads the rest."""

    def normalise(self, spec: Settled, method: TokenReducer) -> Settled:
        """Check the settings of a run, as `Reducer` does.

        Raises:
            Refused: the method or the engine needs answers that are generated token by token.
        """
        name, model, engine = spec.method.name, spec.model.name, spec.engine
        if method.shrinks_pictures:
            raise Refused(
                f"method={name!r} changes the pictures, which model={model!r} has cut into patches; valid: uniform or "
                "pooled"
            )
        if engine.rescore:
            raise Refused(
                f"engine.rescore=true judges answers one token after another, and model={model!r} denoises them; "
                "valid: false"
            )
        if engine.decode != "loop":
            raise Refused(
                f"engine.decode={engine.decode!r} generates one token after another, and model={model!r} denoises "
                "canvases; valid: loop"
            )
        if closes_gaps(engine.positions, method, spec.model.facts):
            raise Refused(
                f"engine.positions={engine.positions!r} closes gaps, and model={model!r} places its canvases after the "
                "whole prompt; valid: original"
            )
        return super().normalise(spec, method)

    def resolve(
        self, spec: RunSpec, method: TokenReducer, digests: Digests
    ) -> ResolvedMethod[TokenReducer]:
        """Check the settings of the answer too.

        Raises:
            UserError: from `CanvasSettings.of`.
            Refused: the benchmark fixes the length of answers, or the answer exceeds the model's positions.
        """
        if spec.benchmark.new_tokens is not None:
            raise Refused(
                f"benchmark={spec.benchmark.name!r} fixes the length of answers, and model={spec.model.name!r} ends "
                "them in a canvas; valid: a benchmark with benchmark.new_tokens=null"
            )
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

    def why_no_paired_timing(self, spec: AnswerRequest, method: TokenReducer) -> str | None:
        """Return the reason: the number of steps depends on the answer."""
        del spec, method
        return (
            "answers on canvases take as many steps as their words need, with the method or without"
        )

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
        flops = flops_block(canvas_flops(facts, record) for record in records)
        return replace(account, flops=flops, extra={**account.extra, "canvas": block})


CANVAS_REDUCER = CanvasReducer()
