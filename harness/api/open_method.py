"""What can be refused before anything is asked, and what answers, for a model that is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from espalier.harness.decoding.diffusion.denoising_settings import check_none
from espalier.harness.decoding.speculative.shared_vocabulary import check_tokenizers
from espalier.harness.decoding.speculative.speculation import Speculation
from espalier.harness.engine.artifacts.priors import Prior, prior_for, prior_layers
from espalier.harness.engine.record import Record
from espalier.harness.errors import Refused
from espalier.harness.kinds.checks import speculative_check as speculative
from espalier.harness.kinds.kind import Responder
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.run_spec import ModelSpec, RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, Method
from espalier.methods.fitprune import FitPrune


@dataclass(frozen=True)
class Settled:
    """A method that has passed every check on a model.

    Attributes:
        spec: with what the method settles by itself, such as the ratio 0 of one that acts nowhere.
        method: with what was calibrated for it filled in.
        prior: the calibrated prior that it reads.
        admitted: whether a change of settings can be checked anew; not with a draft that has no checkpoint.
    """

    spec: RunSpec
    method: Method
    prior: Prior | None = None
    admitted: bool = True

    def check_generation(self, generation: Mapping[str, Any]) -> None:
        """Refuse settings that this kind of method, or of model, cannot follow."""
        model = self.spec.model
        if model.facts.diffusion is None:
            check_none(generation, model.name)
            if (generation.get("num_beams") or 1) == 1:
                return
        if not self.admitted:
            speculative.check_one_beam(self.spec.method.name, generation)
            return
        asked = replace(self.spec, model=replace(model, generation=generation))
        kind_of(self.method, asked).resolve(asked, self.method, Digests())

    def removed(self, record: Record) -> float:
        """Return the share of visual tokens that an answer did without, as the budget's rule counts it.

        Raises:
            BudgetMismatch: what was kept is not what the budget asked for.
        """
        account = kind_of(self.method, self.spec).account(self.spec, self.method, (record,))
        left = float(account.extra["achieved"][self.spec.budget.rule])
        if record.decoding is not None:
            left = float(record.decoding["draft_visual"])
        return 1 - left / record.visual if record.visual else 0.0


def settle(spec: RunSpec, method: Method, borrowed: bool, known: ModelSpec | None) -> Settled:
    """Check what can be checked before anything runs.

    Args:
        spec: what is asked.
        method: the built method.
        borrowed: whether the model has no known checkpoint, so that nothing can have been calibrated on it.
        known: the draft, where it is borrowed.

    Raises:
        Refused: the method does not fit the model, or cannot reach the ratio on it.
        UserError: something that it needs is missing.
        MethodError: a hyper-parameter does not fit the model.
    """
    kind, model = kind_of(method, spec), spec.model
    spec = kind.normalise(spec, method)
    if known is not None:
        return Settled(spec, method, admitted=False)
    if borrowed:
        _refuse_calibrated(model, method, spec.method.name)
    found = kind.resolve(spec, method, Digests()).method
    return Settled(spec, found, prior_for(model, found, spec.store))


def _refuse_calibrated(model: ModelSpec, method: Method, name: str) -> None:
    """Refuse what reads calibrations: of a model in memory nobody knows whose weights it has."""
    unfitted = isinstance(method, FitPrune) and not method.scheme
    if unfitted or prior_layers(method, model.facts.text.layers):
        raise Refused(
            f"method={name!r} reads what was calibrated on a checkpoint, and the model is one in memory; valid: "
            "espalier.load(...) of the checkpoint, or a method that reads no calibration"
        )


@contextmanager
def opened(settled: Settled, adapter: Adapter, draft: Adapter | None) -> Iterator[Responder]:
    """Yield what answers under the method; afterwards the model is as it was.

    Args:
        settled: the method and what it runs under.
        adapter: the loaded model.
        draft: the loaded draft model; None: whoever drafts is loaded here.

    Raises:
        UserError: target and draft do not go together, or the model's attention or layers are not supported.
    """
    spec, method = settled.spec, settled.method
    if draft is None:
        with kind_of(method, spec).open(spec, adapter, method, settled.prior) as found:
            yield found.responder
        return
    assert isinstance(method, Decoder)  # nothing else takes a draft
    _check_vocabularies(adapter, draft)
    with Speculation(spec, adapter, method, draft) as both:
        yield both


def _check_vocabularies(target: Adapter, draft: Adapter) -> None:
    own, other = (one.processor.tokenizer for one in (target, draft))
    added = {*own.get_added_vocab(), *other.get_added_vocab()}
    names = target.spec.name, draft.spec.name
    check_tokenizers(own.get_vocab(), other.get_vocab(), names, added)
