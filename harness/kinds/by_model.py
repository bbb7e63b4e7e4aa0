"""A kind that is carried out one way on a model that denoises, and another on one that says one token after another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from espalier.harness.decoding.diffusion.denoising_settings import refuse_denoising_settings
from espalier.harness.errors import Refused
from espalier.harness.kinds.kind import Account, Admitted, Identity, Kind, Opened
from espalier.harness.specs.run_spec import Asked, RunSpec, Settled
from espalier.methods.base import Method

if TYPE_CHECKING:
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.engine.record import Record
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.store.files.digests import Digests


@dataclass(frozen=True)
class ByModel:
    """Implements Kind.

    Attributes:
        ordinary: on a model that says one token after another.
        denoising: on one that denoises; None: there is no such run.
    """

    ordinary: Kind[Any]
    denoising: Kind[Any] | None = None

    def _of(self, asked: Asked) -> Kind[Any]:
        if asked.model.facts.diffusion is None:
            return self.ordinary
        if self.denoising is None:
            behind = asked.method.compressor
            who = (
                f"method={asked.method.name!r}" if behind is None else f"compressor={behind.name!r}"
            )
            valid = "a method that drops tokens, such as d3tom" if behind is None else "none"
            raise Refused(
                f"{who} needs a model that says one token after another, and model={asked.model.name!r} denoises its "
                f"answers; valid: {valid}"
            )
        return self.denoising

    def settle(self, spec: Settled, method: Method) -> Settled:
        """Choose, and refuse settings of the other kind of model."""
        kind = self._of(spec)
        if kind is self.ordinary and isinstance(spec, RunSpec):
            refuse_denoising_settings(spec.generation, spec.model.name)
        return kind.settle(spec, method)

    def admit(self, spec: RunSpec, method: Method, digests: Digests) -> Admitted[Any]:
        """Choose."""
        return self._of(spec).admit(spec, method, digests)

    def open(
        self, asked: Asked, adapter: Adapter, method: Method, prior: Prior | None = None
    ) -> AbstractContextManager[Opened]:
        """Choose."""
        return self._of(asked).open(asked, adapter, method, prior)

    def unpaired(self, asked: Asked, method: Method) -> str | None:
        """Choose."""
        return self._of(asked).unpaired(asked, method)

    def account(self, asked: Asked, method: Method, records: Sequence[Record]) -> Account:
        """Choose."""
        return self._of(asked).account(asked, method, records)

    def identity(self, asked: Asked, method: Method) -> Identity:
        """Choose; what is refused has a name all the same."""
        kind = self.ordinary if self.denoising is None else self._of(asked)
        return kind.identity(asked, method)
