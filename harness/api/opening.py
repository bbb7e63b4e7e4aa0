"""The two places where the way in for Python asks what kind a method is: what can be refused, and what answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from torch import Tensor

from harness.adapters.base import Adapter
from harness.adapters.chats import Chat
from harness.admission import speculative
from harness.admission.signals import check_frames, check_signals
from harness.artifacts.priors import Prior, prior_for, prior_layers
from harness.artifacts.schemes import with_scheme
from harness.budget import Budget
from harness.decoding.speculation import Speculation
from harness.decoding.vocabulary import check_tokenizers
from harness.digests import Digests
from harness.engine.guards import require_one_beam
from harness.engine.positions import PositionPolicy, closes_gaps
from harness.engine.record import Generated, Record
from harness.engine.session import Session
from harness.errors import Refused
from harness.specs import ModelSpec, RunSpec
from methods.base import Decoder, Method, TokenReducer
from methods.fitprune import FitPrune


class Responder(Protocol):
    """What answers chats."""

    def encode(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Return the inputs of one batch."""

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> Generated:
        """Answer it; `samples` has an id for each row."""

    def decode(self, ids: Tensor) -> list[str]:
        """Turn (B, T) new tokens into texts."""


@dataclass(frozen=True)
class Joined:
    """An adapter and a session as one responder."""

    adapter: Adapter
    session: Session

    def encode(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Return the inputs of one batch."""
        return self.adapter.encode(chats)

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> Generated:
        """Answer it under the session's method."""
        return self.session.generate(inputs, samples, **generation)

    def decode(self, ids: Tensor) -> list[str]:
        """Turn (B, T) new tokens into texts."""
        return self.adapter.decode(ids)


@dataclass(frozen=True)
class Settled:
    """A method that has passed every check on a model.

    Attributes:
        spec: with what the method settles by itself, such as the ratio 0 of one that acts nowhere.
        method: with what was calibrated for it filled in.
        prior: the calibrated prior that it reads.
    """

    spec: RunSpec
    method: TokenReducer | Decoder
    prior: Prior | None = None

    def check_generation(self, generation: Mapping[str, Any]) -> None:
        """Refuse settings that this kind of method cannot follow."""
        if isinstance(self.method, Decoder):
            speculative.check_one_beam(self.spec.method.name, generation)
        elif self.method.decode_site(self.spec.model.facts.text.layers) is not None:
            require_one_beam(generation.get("num_beams") or 1)

    def removed(self, record: Record) -> float:
        """Return the share of visual tokens that an answer did without, as the budget's rule counts it.

        Raises:
            BudgetMismatch: what was kept is not what the budget asked for.
        """
        if record.decoding is not None:
            seen = float(record.decoding["draft_visual"])
            return 1 - seen / record.visual if record.visual else 0.0
        assert isinstance(self.method, TokenReducer)
        budget = self.spec.budget
        found = budget.verify(self.method, self.spec.model.facts, record)
        left: float = getattr(found, budget.rule)
        return 1 - left / record.visual if record.visual and record.kept else 0.0


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
    name, model = spec.method.name, spec.model
    if not isinstance(method, TokenReducer | Decoder):
        raise Refused(
            f"method={type(method).__name__} is neither a TokenReducer nor a Decoder of methods.base; valid: one"
        )
    check_signals(model, method, name)
    if isinstance(method, Decoder):
        spec = speculative.settled(spec, method)
        if known is None:
            speculative.check_draft(spec, method, Digests())
        return Settled(spec, method)
    if borrowed:
        _refuse_calibrated(model, method, name)
    facts = model.facts
    closes_gaps(spec.engine.positions, method, facts)
    if not method.all_sites(facts.tower.layers, facts.text.layers):
        spec = replace(spec, budget=Budget("kept", 0.0))
    method = with_scheme(model, method, name, None, spec.store)
    spec.budget.check(method, facts)
    check_frames(model, method, name)
    return Settled(spec, method, prior_for(model, method, spec.store))


def _refuse_calibrated(model: ModelSpec, method: TokenReducer, name: str) -> None:
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
    with _opened(settled, adapter, draft) as responder:
        yield responder


def _opened(
    settled: Settled, adapter: Adapter, draft: Adapter | None
) -> AbstractContextManager[Responder]:
    spec, method = settled.spec, settled.method
    if isinstance(method, Decoder):
        if draft is not None:
            _check_vocabularies(adapter, draft)
        return Speculation(spec, adapter, method, draft)
    session = Session(
        adapter,
        method,
        spec.budget,
        seed=spec.seed,
        positions=cast("PositionPolicy", spec.engine.positions),
        prior=settled.prior,
    )
    return _joined(adapter, session)


@contextmanager
def _joined(adapter: Adapter, session: Session) -> Iterator[Responder]:
    with session:
        yield Joined(adapter, session)


def _check_vocabularies(target: Adapter, draft: Adapter) -> None:
    own, other = (one.processor.tokenizer for one in (target, draft))
    added = {*own.get_added_vocab(), *other.get_added_vocab()}
    names = target.spec.name, draft.spec.name
    check_tokenizers(own.get_vocab(), other.get_vocab(), names, added)
