"""The kind of a reducer and a compressor on one prompt, built from their two kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from espalier.harness.errors import Refused
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
from espalier.harness.kinds.rescore import Rescored
from espalier.harness.specs.run_spec import AnswerRequest, MethodSpec, RunSpec, Settled
from espalier.methods.base import TokenReducer
from espalier.methods.composed import Composed
from espalier.methods.none import NoReduction

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts import Prior
    from espalier.harness.engine.eviction import CacheBudget
    from espalier.harness.engine.record import SampleRecord
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


class Composition:
    """Implements Kind for espalier.methods.composed.Composed. The budget of the run is that of the reducer."""

    def normalise(self, spec: Settled, method: Composed) -> Settled:
        """Apply the checks of both; the ratio is that of the reducer."""
        if spec.budget.rule == "kv_bytes":
            raise Refused(
                f"budget='kv_bytes': method={spec.method.name!r} and its compressor both shrink the cache, and the "
                "budget is of one; valid: kept"
            )
        evicting = COMPRESSOR.normalise(_of_compressor(spec), method.compressor)
        reducing = REDUCER.normalise(spec, method.reducer)
        # A reducer that drops nothing has no candidates, but the compressor may have some.
        return (
            reducing
            if evicting.engine.separators == "keep"
            else replace(reducing, engine=spec.engine)
        )

    def resolve(
        self, spec: RunSpec, method: Composed, digests: Digests
    ) -> ResolvedMethod[Composed]:
        """Check the reducer and fill in its calibrations; a compressor reads no file."""
        reducer = REDUCER.resolve(spec, method.reducer, digests)
        return ResolvedMethod(replace(method, reducer=reducer.method), reducer.artifacts)

    @contextmanager
    def open(
        self, spec: AnswerRequest, adapter: Adapter, method: Composed, prior: Prior | None = None
    ) -> Iterator[OpenMethod]:
        """Open a session that reduces and then evicts, and one that does neither."""
        # transformers takes seconds to import, and checks and readers of rows do not need it.
        from espalier.harness.engine.session import Session

        session = Session(
            adapter,
            method.reducer,
            spec.budget,
            seed=spec.seed,
            positions=spec.engine.positions,
            prior=prior,
            evicting=_evicting(spec, method),
            decode=spec.engine.decode,
            separators=spec.engine.separators,
        )
        plainly = Session(adapter, NoReduction(), WHOLE, seed=spec.seed, decode=spec.engine.decode)
        with session, plainly as plain:
            generator = Rescored(adapter, session) if spec.engine.rescore else session
            yield OpenMethod(
                generator, adapter, PairedSessions(session, plain), session.collect_scores
            )

    def prompt_reducer(self, method: Composed) -> TokenReducer | None:
        """Return its reducer."""
        return method.reducer

    def why_no_paired_timing(self, spec: AnswerRequest, method: Composed) -> str | None:
        """Return a reason if neither of them saves anything."""
        reducer = REDUCER.why_no_paired_timing(spec, method.reducer)
        return reducer and COMPRESSOR.why_no_paired_timing(spec, method.compressor)

    def account(
        self, spec: AnswerRequest, method: Composed, records: Sequence[SampleRecord]
    ) -> Account:
        """Count the tokens that the reducer keeps, and the entries that the compressor keeps."""
        evicting = _evicting(spec, method)
        for record in records:
            check_held(evicting, record)
        account = REDUCER.account(spec, method.reducer, records)
        return replace(account, extra={**account.extra, **cache_blocks(evicting, records)})

    def identity(self, spec: AnswerRequest, method: Composed) -> Identity:
        """Return the parameters of both, and the settings of the reducer."""
        return identity_of(spec, method, REDUCER.identity(spec, method.reducer).engine)


def _of_compressor(spec: Settled) -> Settled:
    """Return the spec under the name of the compressor, for its error lines; a count of tokens is the reducer's."""
    named, budget = spec.method.compressor, replace(spec.budget, count=None)
    method = spec.method if named is None else MethodSpec(named.name)
    return replace(spec, method=method, budget=budget)


def _evicting(spec: AnswerRequest, method: Composed) -> CacheBudget:
    """Return the budget of the cache; a compressor that acts nowhere evicts nothing."""
    # transformers takes seconds to import, and checks and readers of rows do not need it.
    from espalier.harness.engine.eviction import CacheBudget

    acts = method.compressor.sites(spec.model.facts.text.layers)
    return CacheBudget(method.compressor, method.cache_ratio if acts else 0.0)


COMPOSITION = Composition()
