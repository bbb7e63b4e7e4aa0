"""A reducer and a compressor on one prompt: a kind of two, which asks each of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.kinds.base import Account, Admitted, Identity, Opened
from harness.kinds.compressor import COMPRESSOR, check_whole
from harness.kinds.identities import identity_of
from harness.kinds.reducer import REDUCER
from harness.specs import Asked, RunSpec, Settled
from methods.composed import Composed

if TYPE_CHECKING:
    from harness.adapters.base import Adapter
    from harness.artifacts.priors import Prior
    from harness.digests import Digests
    from harness.engine.record import Record


class Composition:
    """Implements Kind for methods.composed.Composed. The budget is the reducer's; nothing is evicted so far."""

    def settle(self, spec: Settled, method: Composed) -> Settled:
        """Let both refuse; the ratio is the reducer's."""
        COMPRESSOR.settle(spec, method.compressor)
        return REDUCER.settle(spec, method.reducer)

    def admit(self, spec: RunSpec, method: Composed, digests: Digests) -> Admitted[Composed]:
        """Let the reducer, the only one that acts, be checked and filled in."""
        reducer = REDUCER.admit(spec, method.reducer, digests)
        return Admitted(replace(method, reducer=reducer.method), reducer.artifacts)

    def open(
        self, asked: Asked, adapter: Adapter, method: Composed, prior: Prior | None = None
    ) -> AbstractContextManager[Opened]:
        """Answer as the reducer alone does, with the whole cache of what it leaves."""
        return REDUCER.open(asked, adapter, method.reducer, prior)

    def unpaired(self, asked: Asked, method: Composed) -> str | None:
        """Time what the reducer saves."""
        return REDUCER.unpaired(asked, method.reducer)

    def account(self, asked: Asked, method: Composed, records: Sequence[Record]) -> Account:
        """Count what the reducer left of each prompt, once the caches are seen to hold all of that."""
        check_whole(records)
        return REDUCER.account(asked, method.reducer, records)

    def identity(self, asked: Asked, method: Composed) -> Identity:
        """Name both; the settings are those that concern the reducer."""
        return identity_of(asked, method, REDUCER.identity(asked, method.reducer).engine)


COMPOSITION = Composition()
