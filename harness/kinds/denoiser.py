"""Methods that drop visual tokens at each denoising step; no model here denoises, so none of them may act yet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from harness.errors import Refused
from harness.kinds.base import Account, Admitted, Identity, Opened
from harness.kinds.identities import answering_settings, identity_of
from harness.kinds.reducer import REDUCER
from harness.specs import Asked, RunSpec, Settled
from methods.denoiser import DenoisingReducer
from methods.none import NoReduction

if TYPE_CHECKING:
    from harness.adapters.base import Adapter
    from harness.artifacts.priors import Prior
    from harness.digests import Digests
    from harness.engine.record import Record


class Denoiser:
    """Implements Kind for methods.denoiser.DenoisingReducer."""

    def settle(self, spec: Settled, method: DenoisingReducer) -> Settled:
        """Refuse to act where there are no denoising steps; what acts nowhere has the ratio 0."""
        facts = spec.model.facts
        if method.read_sites(facts.tower.layers, facts.text.layers):
            raise Refused(
                f"method={spec.method.name!r} drops tokens at denoising steps, and model={spec.model.name!r} decodes "
                "one token after another; valid: a method that drops them in the prefill, such as fastv"
            )
        return REDUCER.settle(spec, NoReduction())

    def admit(
        self, spec: RunSpec, method: DenoisingReducer, digests: Digests
    ) -> Admitted[DenoisingReducer]:
        """Check the run as one of the whole model."""
        REDUCER.admit(spec, NoReduction(), digests)
        return Admitted(method)

    def open(
        self, asked: Asked, adapter: Adapter, method: DenoisingReducer, prior: Prior | None = None
    ) -> AbstractContextManager[Opened]:
        """Answer with every token."""
        del method
        return REDUCER.open(asked, adapter, NoReduction(), prior)

    def unpaired(self, asked: Asked, method: DenoisingReducer) -> str | None:
        """Time nothing where nothing is dropped."""
        del method
        return REDUCER.unpaired(asked, NoReduction())

    def account(self, asked: Asked, method: DenoisingReducer, records: Sequence[Record]) -> Account:
        """Count whole prompts."""
        del method
        return REDUCER.account(asked, NoReduction(), records)

    def identity(self, asked: Asked, method: DenoisingReducer) -> Identity:
        """Name the settings of answers of one model; positions stay, for no token leaves the prompt."""
        return identity_of(asked, method, answering_settings(asked.engine, acts=False))


DENOISER = Denoiser()
