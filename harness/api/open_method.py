"""Check a method against a loaded model, and open it for answering."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from espalier.harness.decoding.speculative.shared_vocabulary import check_tokenizers
from espalier.harness.decoding.speculative.speculation import Speculation, with_chats
from espalier.harness.engine.priors import Prior, prior_for, prior_layers
from espalier.harness.engine.record import SampleRecord
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.kind import OpenMethod
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.generation import TOKENS, check_answers
from espalier.harness.specs.run_spec import ModelSpec, RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Decoder, Method
from espalier.methods.fitprune import FitPrune


@dataclass(frozen=True)
class CheckedMethod:
    """A method that has passed all checks for a model.

    Attributes:
        spec: the run, with the values that the method sets itself, such as ratio 0 for a method without sites.
        method: the method, with calibrated parameters filled in.
        prior: the calibrated prior that the method reads.
        admitted: whether changed settings can be checked again; False with a draft that has no checkpoint.
    """

    spec: RunSpec
    method: Method
    prior: Prior | None = None
    admitted: bool = True

    @property
    def acts(self) -> bool:
        """Whether the model answers in another way than by itself: fewer tokens, fewer cache entries, or a draft."""
        compressor = self.spec.method.compressor
        evicts = compressor is not None and compressor.ratio > 0
        return self.spec.budget.ratio > 0 or evicts or self.method.drafts

    def check_generation(self, generation: Mapping[str, Any]) -> None:
        """Raise UserError for generation settings that this kind of method or model does not support."""
        model = self.spec.model
        changed = replace(self.spec, model=replace(model, generation=generation))
        if not model.facts.denoises:
            check_answers(generation, TOKENS, f"model={model.name!r}")
            if (generation.get("num_beams") or 1) == 1:
                return
        if not self.admitted:
            refuse("answers of a decoder", changed)
            return
        kind_of(self.method, changed).resolve(changed, self.method, Digests())

    def removed(self, record: SampleRecord) -> float:
        """Return the share of visual tokens removed for an answer, counted by the budget's rule.

        Raises:
            BudgetMismatch: the kept tokens do not match the budget.
        """
        account = kind_of(self.method, self.spec).account(self.spec, self.method, (record,))
        kept = float(
            account.extra["achieved"][self.spec.budget.rule]
            if record.decoding is None
            else record.decoding["draft_visual"]
        )
        return 1 - kept / record.visual if record.visual else 0.0


def settle(spec: RunSpec, method: Method, borrowed: bool, has_own_draft: bool) -> CheckedMethod:
    """Run all checks that need no forward pass.

    Args:
        spec: the requested run.
        method: the built method.
        borrowed: whether the model has no known checkpoint, so that no calibration can belong to it.
        has_own_draft: whether the caller owns the draft as well.

    Raises:
        Refused: the method does not suit the model, or cannot reach the ratio on it.
        UserError: a required file or setting is missing.
        MethodError: a hyper-parameter does not suit the model.
    """
    kind, model = kind_of(method, spec), spec.model
    spec = kind.normalise(spec, method)
    if has_own_draft:
        return CheckedMethod(spec, method, admitted=False)
    if borrowed:
        refuse_calibrated(model, method, spec.method.name)
    admitted = kind.resolve(spec, method, Digests()).method
    return CheckedMethod(spec, admitted, prior_for(model, admitted, spec.store))


def require_amount(spec: RunSpec, *amounts: object) -> None:
    """Raise UserError if a method removes tokens and the caller set no budget.

    Args:
        spec: the settled run.
        amounts: `ratio` and `keep` of the caller; None: not given.
    """
    if spec.budget.ratio > 0 and all(amount is None for amount in amounts):
        raise UserError(
            f"ratio=None: method={spec.method.title!r} removes visual tokens; valid: ratio=<share removed>, "
            "or keep=<number of tokens kept>"
        )


def refuse_calibrated(model: ModelSpec, method: Method, name: str) -> None:
    """Refuse methods that read calibrations: the weights of a model in memory are unknown."""
    unfitted = any(isinstance(part, FitPrune) and not part.scheme for part in method.parts)
    if unfitted or prior_layers(method, model.facts.text.layers):
        raise Refused(
            f"method={name!r} reads a calibration of a checkpoint, but the model was passed in memory; valid: "
            "espalier.load(...) of the checkpoint, or a method without calibration"
        )


@contextmanager
def open_responder(
    checked: CheckedMethod, adapter: Adapter, draft: Adapter | None
) -> Iterator[OpenMethod]:
    """Yield a responder that answers with the method applied, and restore the model afterwards.

    Args:
        checked: the method and its run.
        adapter: the loaded model.
        draft: the loaded draft model; None: a draft, if needed, is loaded here.

    Raises:
        UserError: target and draft do not match, or the model's attention or layers are not supported.
    """
    spec, method = checked.spec, checked.method
    if draft is None:
        with kind_of(method, spec).open(spec, adapter, method, checked.prior) as open_kind:
            yield open_kind
        return
    assert isinstance(method, Decoder)  # only decoders take a draft
    tokenizers = [model.processor.tokenizer for model in (adapter, draft)]
    added = {word for tokenizer in tokenizers for word in tokenizer.get_added_vocab()}
    words, draft_words = (tokenizer.get_vocab() for tokenizer in tokenizers)
    check_tokenizers(words, draft_words, (adapter.spec.name, draft.spec.name), added)
    with Speculation(spec, adapter, method, draft) as speculation:
        yield OpenMethod(speculation, adapter, prepare=with_chats)
