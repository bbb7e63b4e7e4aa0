"""The protocol of kinds of method, and the plain data that kinds exchange with the packages above."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from espalier.harness.cost.budget import Budget
from espalier.harness.settings import BY_METHOD, marked
from espalier.harness.specs.run_spec import (
    AnswerRequest,
    EngineSpec,
    ModelSpec,
    RunSpec,
    Settled,
)
from espalier.methods.base import Method, TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.priors import Prior
    from espalier.harness.engine.record import GeneratedBatch, SampleRecord
    from espalier.harness.engine.session_setup import PrefillScores
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.models.chat_media import Chat
    from espalier.harness.store.files.digests import Digests

M = TypeVar("M", bound=Method)

#: Turns one batch of chats into inputs in memory.
Prepare = Callable[[Sequence["Chat"]], Mapping[str, Any]]


def prepared(adapter: Adapter, chats: Sequence[Chat]) -> Mapping[str, Any]:
    """Return the inputs of one batch of chats in memory, as the model takes them."""
    return adapter.prepare(chats)


class Generator(Protocol):
    """Generates answers, such as an open engine session."""

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> GeneratedBatch:
        """Answer one left-padded batch; `samples` has an id for each row."""


@dataclass(frozen=True)
class PairedSessions:
    """Two open sessions on one model, one with the method and one without."""

    reduced: Generator
    plain: Generator


@dataclass(frozen=True)
class OpenMethod:
    """A method that is installed on a loaded model.

    Attributes:
        generator: answers encoded chats under the method.
        adapter: of the model; decodes the answers.
        paired: sessions to time in pairs; None where the kind compares with plain answers by itself.
        collect_scores: opens a block that collects attention and scores of a prefill; None where answers take several.
        prepare: turns chats into what the generator takes, in memory.
    """

    generator: Generator
    adapter: Adapter
    paired: PairedSessions | None = None
    collect_scores: Callable[[], AbstractContextManager[PrefillScores]] | None = None
    prepare: Callable[[Adapter, Sequence[Chat]], Mapping[str, Any]] = prepared

    def encode(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Return the inputs of one batch of chats on the model's device."""
        return self.adapter.to_device(self.prepare(self.adapter, chats))

    def preparer(self) -> Prepare:
        """Return a function for another thread that prepares chats in memory; `to_device` completes what it returns."""
        return partial(self.prepare, self.adapter.thread_copy)


@dataclass(frozen=True)
class ResolvedMethod(Generic[M]):
    """A method with its calibrations filled in, and the other files that its kind reads."""

    method: M
    artifacts: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Account:
    """The telemetry of samples for a row.

    Attributes:
        tokens: means of counts.
        flops: the block of that name.
        kv_bytes: mean bytes of a sample's cache after the prefill.
        extra: blocks below `extra`; null where one does not apply to the kind.
    """

    tokens: Mapping[str, float]
    flops: Mapping[str, Any]
    kv_bytes: float
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Identity:
    """The part of the key and the name of a row that depends on the method.

    Attributes:
        methods: the methods that the run uses, in the order in which they act.
        params: hyper-parameters, defaults filled in.
        engine: engine settings by name; null where one does not change the numbers of this method.
        draft: the model that drafts.
        label: distinguishes configurations of one method.
    """

    methods: tuple[Method, ...]
    params: Mapping[str, Any]
    engine: Mapping[str, Any]
    draft: ModelSpec | None
    label: str


class Kind(ABC, Generic[M]):
    """How a run uses one kind of method, from the command line to the row."""

    #: Why runs of this kind are never timed in pairs with the unreduced model; None: most are.
    untimed: ClassVar[str | None] = None

    @abstractmethod
    def normalise(self, spec: Settled, method: M) -> Settled:
        """Return the spec with the settings that the kind determines, such as the ratio 0 of an idle method.

        Reads no file.

        Raises:
            UserError: a setting that the kind does not support.
            Refused: the model lacks a signal, or the method needs a site that the engine does not have.
        """

    @abstractmethod
    def resolve(self, spec: RunSpec, method: M, digests: Digests) -> ResolvedMethod[M]:
        """Return the method with its calibrations, after the checks that need files; the checkpoint is checked before.

        Raises:
            UserError: artifacts or a draft are missing or wrong, or the ratio cannot be reached.
        """

    @abstractmethod
    def open(
        self, spec: AnswerRequest, adapter: Adapter, method: M, prior: Prior | None = None
    ) -> AbstractContextManager[OpenMethod]:
        """Install the method on a loaded model for the length of a `with` block; the model is restored afterwards.

        Args:
            spec: normalised by `normalise`.
            adapter: the model.
            method: the method, as `resolve` returned it.
            prior: the calibrated prior, for methods that need one.
        """

    def prompt_reducer(self, _method: M) -> TokenReducer | None:
        """Return the reducer of a single engine session; None where answers are generated in other ways."""
        return None

    def why_no_paired_timing(self, _spec: AnswerRequest, _method: M) -> str | None:
        """Return why a run is not timed in pairs with the unreduced model; None if it can be."""
        return self.untimed

    @abstractmethod
    def account(self, spec: AnswerRequest, method: M, records: Sequence[SampleRecord]) -> Account:
        """Return the counts of these samples for the row, each verified against the budget.

        Raises:
            BudgetMismatch: a sample kept another number of tokens than requested.
        """

    @abstractmethod
    def identity(self, spec: AnswerRequest, method: M) -> Identity:
        """Return what identifies the method in the key, the settings and the label of the row."""


def identity_of(
    spec: AnswerRequest,
    method: Method,
    concerning: Mapping[str, Any],
    draft: ModelSpec | None = None,
) -> Identity:
    """Return the identity of a method.

    Args:
        spec: the run.
        method: the method.
        concerning: the engine settings that change its numbers.
        draft: the model that drafts.
    """
    return Identity(
        methods=method.parts,
        params=params_of(method),
        engine={name: concerning.get(name) for name in marked(EngineSpec, BY_METHOD)},
        draft=draft,
        label=label(method, spec.method.variant, spec.method.variants, spec.budget),
    )


def params_of(method: Method) -> dict[str, Any]:
    """Return the hyper-parameters of a method; of a composition its own, and those of each part by class name."""
    if len(method.parts) == 1:
        return asdict(method)
    params: dict[str, Any] = {}
    for field in fields(method):
        value = getattr(method, field.name)
        if not isinstance(value, Method):
            params[field.name] = value
        elif len(value.parts) == 1:
            params[type(value).__qualname__] = asdict(value)
        else:
            params |= params_of(value)
    return params


def separators_of(engine: EngineSpec) -> str | None:
    """Return the setting of separators in a row; null where they stay, as in rows older than the setting."""
    return None if engine.separators == "keep" else engine.separators


def answering_settings(engine: EngineSpec, acts: bool) -> dict[str, Any]:
    """Return the settings that change answers of one model.

    Args:
        engine: all engine settings.
        acts: whether tokens leave the prompt; otherwise no policy for gaps applies.
    """
    return {
        "backend": engine.backend,
        # The size that `auto` finds depends on the machine; greedy answers do not depend on the batch.
        "batch_size": engine.batch_size,
        "positions": engine.positions if acts else None,
        "separators": separators_of(engine),
        "decode": engine.decode,
        "rescore": engine.rescore,
    }


def label(
    method: Method, variant: str, variants: Mapping[str, Mapping[str, Any]], budget: Budget
) -> str:
    """Return the label of a method's configuration: parameters off their default, and which of several variants it is.

    The default of a parameter is what the variant sets, else that of the class. Parameters that repeat the budget are
    left out: they change along a curve. A composition has the labels of its parts before its own; the variant is that
    of its first part.
    """
    sets = variants.get(variant, {})
    first = method.parts[0]
    parts = [part for part in method.parts if part is not method]
    named = [
        (type(part).__name__, _changed(part, sets if part is first else {}, budget))
        for part in parts
    ]
    words = [f"{name}({' '.join(changed)})" for name, changed in named if changed]
    values = (getattr(method, field.name) for field in fields(method))
    within = [part for part in values if isinstance(part, Method) and len(part.parts) > 1]
    words += [word for part in within for word in _changed(part, {}, budget)]
    return " ".join([*words, *_changed(method, sets, budget), *([variant] if sets else [])])


def _changed(method: Method, sets: Mapping[str, Any], budget: Budget) -> list[str]:
    repeated = {"ratio": budget.ratio, "rule": budget.rule}
    values = [
        (field.name, getattr(method, field.name), sets.get(field.name, field.default))
        for field in fields(method)
    ]
    return [
        f"{name}={value}"
        for name, value, default in values
        if default is not MISSING and value != default and repeated.get(name) != value
    ]
