"""Methods by which a draft guesses the answer ahead: two models answer together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from espalier.harness.decoding.speculative.speculative_summary import speculative_block
from espalier.harness.kinds.checks import speculative_check as speculative
from espalier.harness.kinds.checks.signal_check import check_signals
from espalier.harness.kinds.identity import identity_of, separators_of
from espalier.harness.kinds.kind import Account, Admitted, Identity, Opened
from espalier.harness.kinds.sample_counts import account_of
from espalier.harness.specs.run_spec import Asked, RunSpec, Settled
from espalier.methods.base import Decoder
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.engine.record import Record
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class SpeculativeDecoder:
    """Implements Kind for espalier.methods.base.Decoder. Nothing is taken from the target's own prompt."""

    def settle(self, spec: Settled, method: Decoder) -> Settled:
        """Take one sample in a batch, and the ratio of what the draft is known to see."""
        check_signals(spec.model, method, spec.method.name, Decoder)
        spec = speculative.settled(spec, method)
        speculative.check_graphs(spec, method)
        return spec

    def admit(self, spec: RunSpec, method: Decoder, digests: Digests) -> Admitted[Decoder]:
        """Check the draft as the target is checked, and that the two go together."""
        speculative.check_one_beam(spec.method.name, spec.generation)
        return Admitted(method, speculative.check_draft(spec, method, digests))

    @contextmanager
    def open(
        self, asked: Asked, adapter: Adapter, method: Decoder, prior: Prior | None = None
    ) -> Iterator[Opened]:
        """Start whoever drafts; with `engine.compare` each answer is decoded plainly beside it, so there are no rivals.

        No decoder reads a prior in the target, and the draft's is found where the draft is.
        """
        del prior
        # transformers takes seconds to import, and whoever only checks or reads rows need not pay for it.
        from espalier.harness.decoding.speculative.speculation import Speculation

        with Speculation(asked, adapter, method) as both:
            yield Opened(both)

    def unpaired(self, asked: Asked, method: Decoder) -> str | None:
        """Say where the speed-up is instead."""
        del asked, method
        return "decoders are timed by engine.compare: extra.speculative"

    def account(self, asked: Asked, method: Decoder, records: Sequence[Record]) -> Account:
        """Count whole prompts, and how the two models did together."""
        found = account_of(asked, NoReduction(), records)
        decodings = [record.decoding for record in records if record.decoding is not None]
        block = speculative_block(decodings, method.overlap)
        seen, every = fmean(map(_draft_positions, records)), found.tokens["positions"]
        block["draft_positions"] = seen
        block["draft_positions_share"] = seen / every if every else 0.0
        return replace(found, extra={**found.extra, "speculative": block})

    def identity(self, asked: Asked, method: Decoder) -> Identity:
        """Name the settings of two models that answer together."""
        engine = asked.engine
        concerning = {
            "positions": engine.positions if speculative.leaves_gaps(method) else None,
            "separators": separators_of(engine),
            "transport": _transport(engine.transport, method),
            "compare": engine.compare,
            "graphs": engine.graphs,
        }
        return identity_of(asked, method, concerning, asked.method.draft)


def _draft_positions(record: Record) -> float:
    """Return the positions of images that a draft saw: newlines and separators stand wherever a visual token does."""
    seen = 0.0 if record.decoding is None else float(record.decoding["draft_visual"])
    return seen + record.special if seen else 0.0


def _transport(asked: str, method: Decoder) -> str | None:
    if not method.takes_draft:
        return None
    # Sides that never work at once take turns in one process under `auto` too.
    return "auto" if asked == "sequential" and not method.overlap else asked


DECODER = SpeculativeDecoder()
