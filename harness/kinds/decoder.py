"""The kind of speculative decoders: a draft proposes tokens, the target verifies them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from espalier.harness.kinds.checks import speculative_check as speculative
from espalier.harness.kinds.checks.signal_check import check_signals, refuse_partial
from espalier.harness.kinds.identity import identity_of, separators_of
from espalier.harness.kinds.kind import Account, Identity, OpenMethod, ResolvedMethod
from espalier.harness.kinds.sample_counts import account_of
from espalier.harness.specs.run_spec import AnswerRequest, RunSpec, Settled
from espalier.methods.base import Decoder, PlanError, TokenReducer
from espalier.methods.blame import Blame
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts import Prior
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class SpeculativeDecoder:
    """Implements Kind for espalier.methods.base.Decoder. The prompt of the target stays whole."""

    def normalise(self, spec: Settled, method: Decoder) -> Settled:
        """Take batches of one sample, and the ratio that follows from what the draft sees."""
        refuse_partial(spec.model, spec.method.name, "verifies several tokens at a step")
        check_signals(spec.model, method, spec.method.name, Decoder)
        spec = speculative.normalised(spec, method)
        speculative.check_graphs(spec, method)
        return spec

    def resolve(self, spec: RunSpec, method: Decoder, digests: Digests) -> ResolvedMethod[Decoder]:
        """Check the draft like the target, and that the two are compatible."""
        speculative.check_one_beam(spec.method.name, spec.generation)
        with Blame(method, "window"):
            _check_window(method.window)
        return ResolvedMethod(method, speculative.check_draft(spec, method, digests))

    @contextmanager
    def open(
        self, spec: AnswerRequest, adapter: Adapter, method: Decoder, prior: Prior | None = None
    ) -> Iterator[OpenMethod]:
        """Start the draft. With `engine.compare` each answer is also decoded plainly, so there are no paired sessions.

        No decoder reads a prior in the target, and the prior of the draft is loaded with the draft.
        """
        del prior
        # transformers takes seconds to import, and checks and readers of rows do not need it.
        from espalier.harness.decoding.speculative.speculation import Speculation

        with Speculation(spec, adapter, method) as speculation:
            yield OpenMethod(speculation, speculation)

    def prompt_reducer(self, method: Decoder) -> TokenReducer | None:
        """Return None: two models answer."""
        del method
        return None

    def why_no_paired_timing(self, spec: AnswerRequest, method: Decoder) -> str | None:
        """Return where the speed-up is stored instead."""
        del spec, method
        return "decoders are timed by engine.compare: extra.speculative"

    def account(
        self, spec: AnswerRequest, method: Decoder, records: Sequence[SampleRecord]
    ) -> Account:
        """Count whole prompts, and summarise the decoding of both models."""
        # Imports scipy, half a second, and only finished runs have an account.
        from espalier.harness.decoding.speculative.speculative_summary import speculative_block

        account = account_of(spec, NoReduction(), records)
        decodings = [record.decoding for record in records if record.decoding is not None]
        block = speculative_block(decodings, method.overlap)
        positions, every = fmean(map(_draft_positions, records)), account.tokens["positions"]
        block["draft_positions"] = positions
        block["draft_positions_share"] = positions / every if every else 0.0
        return replace(account, extra={**account.extra, "speculative": block})

    def identity(self, spec: AnswerRequest, method: Decoder) -> Identity:
        """Return the settings of target and draft."""
        engine = spec.engine
        concerning = {
            "positions": engine.positions if speculative.leaves_gaps(method) else None,
            "separators": separators_of(engine),
            "transport": _transport(engine.transport, method),
            "compare": engine.compare,
            "graphs": engine.graphs,
        }
        return identity_of(spec, method, concerning, spec.method.draft)


def _check_window(window: object) -> None:
    is_count = isinstance(window, int) and not isinstance(window, bool) and window >= 1
    if not is_count and window not in ("auto", "best"):
        raise PlanError(f"`window` is {window!r}; valid: a number of 1 or more, 'auto' or 'best'")


def _draft_positions(record: SampleRecord) -> float:
    """Return the positions of images in the draft's prompt; newlines and separators count if any visual token stays."""
    positions = 0.0 if record.decoding is None else float(record.decoding["draft_visual"])
    return positions + record.special if positions else 0.0


def _transport(transport: str, method: Decoder) -> str | None:
    if not method.takes_draft:
        return None
    # Sides that never work at once alternate in one process under `auto` too.
    return "auto" if transport == "sequential" and not method.overlap else transport


DECODER = SpeculativeDecoder()
