"""Methods that evict entries of the key-value cache after the prefill; eviction itself is not carried out yet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from harness.budget import BudgetMismatch
from harness.errors import Refused
from harness.kinds.base import Account, Admitted, Identity, Opened
from harness.kinds.identities import answering_settings, identity_of
from harness.kinds.reducer import REDUCER
from harness.specs import Asked, RunSpec, Settled
from methods.compressor import CacheCompressor
from methods.none import NoReduction

if TYPE_CHECKING:
    from harness.adapters.base import Adapter
    from harness.artifacts.priors import Prior
    from harness.digests import Digests
    from harness.engine.record import Record


class Compressor:
    """Implements Kind for methods.compressor.CacheCompressor: the prompt stays whole, and so does the cache so far."""

    def settle(self, spec: Settled, method: CacheCompressor) -> Settled:
        """Refuse to evict; what evicts nothing has the ratio 0."""
        sites = method.sites(spec.model.facts.text.layers)
        if sites:
            layers = ", ".join(str(site.layer) for site in sites)
            raise Refused(
                f"method={spec.method.name!r} evicts cache entries (layers {layers}), which is not carried out yet; "
                "valid: a method that drops tokens of the prompt, such as fastv"
            )
        return REDUCER.settle(spec, NoReduction())

    def admit(
        self, spec: RunSpec, method: CacheCompressor, digests: Digests
    ) -> Admitted[CacheCompressor]:
        """Check the run as one of the whole model."""
        REDUCER.admit(spec, NoReduction(), digests)
        return Admitted(method)

    def open(
        self, asked: Asked, adapter: Adapter, method: CacheCompressor, prior: Prior | None = None
    ) -> AbstractContextManager[Opened]:
        """Answer with the whole cache."""
        del method
        return REDUCER.open(asked, adapter, NoReduction(), prior)

    def unpaired(self, asked: Asked, method: CacheCompressor) -> str | None:
        """Time nothing where nothing is evicted."""
        del method
        return REDUCER.unpaired(asked, NoReduction())

    def account(self, asked: Asked, method: CacheCompressor, records: Sequence[Record]) -> Account:
        """Count whole prompts, once the caches are seen to hold what entered their layers."""
        del method
        check_whole(records)
        return REDUCER.account(asked, NoReduction(), records)

    def identity(self, asked: Asked, method: CacheCompressor) -> Identity:
        """Name the settings of answers of one model; positions stay, for no token leaves the prompt."""
        return identity_of(asked, method, answering_settings(asked.engine, acts=False))


def check_whole(records: Sequence[Record]) -> None:
    """Raise BudgetMismatch if a sample's cache holds another number of visual entries than entered its layers."""
    for record in records:
        if record.kv_entries != sum(record.entering):
            raise BudgetMismatch(
                f"sample {record.sample}: the cache holds {record.kv_entries} visual entries, "
                f"{sum(record.entering)} entered its layers and none was to go"
            )


COMPRESSOR = Compressor()
