"""A reducer and a compressor on one prompt: a kind of two, which asks each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from espalier.harness.engine.eviction import CacheBudget
from espalier.harness.kinds.chat_answerer import Joined
from espalier.harness.kinds.compressor import COMPRESSOR, cache_blocks, check_held
from espalier.harness.kinds.identity import identity_of
from espalier.harness.kinds.kind import (
    Account,
    Identity,
    OpenMethod,
    PairedSessions,
    ResolvedMethod,
)
from espalier.harness.kinds.reducer import REDUCER, WHOLE
from espalier.harness.specs.run_spec import Asked, MethodSpec, RunSpec, Settled
from espalier.methods.base import TokenReducer
from espalier.methods.composed import Composed
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.engine.record import Record
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class Composition:
    """Implements Kind for espalier.methods.composed.Composed. The run's budget is the reducer's."""

    def normalise(self, spec: Settled, method: Composed) -> Settled:
        """Let both refuse; the ratio is the reducer's."""
        behind = COMPRESSOR.normalise(_behind(spec), method.compressor)
        found = REDUCER.normalise(spec, method.reducer)
        # A reducer that drops nothing has no candidates; the compressor may have some.
        return found if behind.engine.separators == "keep" else replace(found, engine=spec.engine)

    def resolve(
        self, spec: RunSpec, method: Composed, digests: Digests
    ) -> ResolvedMethod[Composed]:
        """Let the reducer be checked and filled in; a compressor reads no file."""
        reducer = REDUCER.resolve(spec, method.reducer, digests)
        return ResolvedMethod(replace(method, reducer=reducer.method), reducer.artifacts)

    @contextmanager
    def open(
        self, asked: Asked, adapter: Adapter, method: Composed, prior: Prior | None = None
    ) -> Iterator[OpenMethod]:
        """Open a session that reduces and then evicts, and one that does neither."""
        # transformers takes seconds to import, and whoever only checks or reads rows need not pay for it.
        from espalier.harness.engine.session import Session

        session = Session(
            adapter,
            method.reducer,
            asked.budget,
            seed=asked.seed,
            positions=asked.engine.positions,
            prior=prior,
            evicting=_evicting(asked, method),
            decode=asked.engine.decode,
            separators=asked.engine.separators,
        )
        plainly = Session(
            adapter, NoReduction(), WHOLE, seed=asked.seed, decode=asked.engine.decode
        )
        with session, plainly as plain:
            yield OpenMethod(
                Joined.of(adapter, session, asked.engine.rescore), PairedSessions(session, plain)
            )

    def prompt_reducer(self, method: Composed) -> TokenReducer | None:
        """Return its reducer."""
        return method.reducer

    def why_no_paired_timing(self, asked: Asked, method: Composed) -> str | None:
        """Time what either of them saves."""
        reducer = REDUCER.why_no_paired_timing(asked, method.reducer)
        return reducer and COMPRESSOR.why_no_paired_timing(asked, method.compressor)

    def account(self, asked: Asked, method: Composed, records: Sequence[Record]) -> Account:
        """Count what the reducer left of each prompt, and what the compressor left of its cache."""
        evicting = _evicting(asked, method)
        for record in records:
            check_held(evicting, record)
        found = REDUCER.account(asked, method.reducer, records)
        return replace(found, extra={**found.extra, **cache_blocks(evicting, records)})

    def identity(self, asked: Asked, method: Composed) -> Identity:
        """Name both; the settings are those that concern the reducer."""
        return identity_of(asked, method, REDUCER.identity(asked, method.reducer).engine)


def _behind(spec: Settled) -> Settled:
    """Return the spec with the compressor's name, for its error lines."""
    named = spec.method.compressor
    return spec if named is None else replace(spec, method=MethodSpec(named.name))


def _evicting(asked: Asked, method: Composed) -> CacheBudget:
    """Return what goes: a compressor that acts nowhere evicts nothing."""
    acts = method.compressor.sites(asked.model.facts.text.layers)
    return CacheBudget(method.compressor, method.cache_ratio if acts else 0.0)


COMPOSITION = Composition()
