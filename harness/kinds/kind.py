"""The protocol of all kinds of method, and the plain data that passes between a kind and the rooms above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from espalier.harness.specs.run_spec import Asked, ModelSpec, RunSpec, Settled
from espalier.methods.base import Method, TokenReducer

if TYPE_CHECKING:
    from torch import Tensor

    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.engine.record import Generated, Record
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.models.chat_media import Chat
    from espalier.harness.store.files.digests import Digests

M = TypeVar("M", bound=Method)

#: From one batch of chats to inputs in memory.
Prepare = Callable[[Sequence["Chat"]], Mapping[str, Any]]


class Generator(Protocol):
    """What generates: an open engine session, for one."""

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> Generated:
        """Answer one left-padded batch; `samples` has an id for each row."""


class Responder(Generator, Protocol):
    """What answers chats: it encodes them, generates, and turns ids into texts."""

    def encode(self, chats: Sequence[Chat]) -> Mapping[str, Any]:
        """Return the inputs of one batch of chats."""

    def preparer(self) -> Prepare:
        """Return what prepares chats in another thread, in memory; `moved` makes of it what `encode` returns."""

    def moved(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return prepared inputs where the model takes them."""

    def decode(self, ids: Tensor) -> list[str]:
        """Turn (B, T) new tokens into answers."""

    def told(self, chat: Chat) -> dict[str, str | None]:
        """Return what a row says of prompts, by the example of a chat."""


@dataclass(frozen=True)
class PairedSessions:
    """Two open sessions over one model: the method's own, and one without a method."""

    own: Generator
    plain: Generator


@dataclass(frozen=True)
class OpenMethod:
    """A method at work on a loaded model.

    Attributes:
        responder: answers chats under the method.
        rivals: what may be timed beside each other; None where the kind compares with plain answers by itself.
    """

    responder: Responder
    rivals: PairedSessions | None = None


@dataclass(frozen=True)
class ResolvedMethod(Generic[M]):
    """A method with all that was calibrated for it filled in, and the other files that its kind reads."""

    method: M
    artifacts: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Account:
    """What a row says of its samples' telemetry.

    Attributes:
        tokens: means of counts.
        flops: the block of that name.
        kv_bytes: mean bytes of a sample's cache after the prefill.
        extra: blocks below `extra`; null where one does not concern the kind.
    """

    tokens: Mapping[str, float]
    flops: Mapping[str, Any]
    kv_bytes: float
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Identity:
    """What a method adds to the key and the name of a row.

    Attributes:
        methods: those whose code the run goes through, in the order in which they act.
        params: hyper-parameters, defaults filled in.
        engine: settings of the engine by name; null where one makes no difference to this method.
        draft: the model that drafts.
        label: what tells configurations of one method apart.
    """

    methods: tuple[Method, ...]
    params: Mapping[str, Any]
    engine: Mapping[str, Any]
    draft: ModelSpec | None
    label: str


class Kind(Protocol[M]):
    """What a run does with one kind of method, from the command line to the row."""

    def normalise(self, spec: Settled, method: M) -> Settled:
        """Return the spec with what the kind leaves no choice about, as the ratio of a method that acts nowhere.

        Reads no file.

        Raises:
            UserError: a setting that the kind cannot honour.
            Refused: the model lacks what the method reads, or the method asks for what is not carried out.
        """

    def resolve(self, spec: RunSpec, method: M, digests: Digests) -> ResolvedMethod[M]:
        """Check all else that can be known before the model is loaded, whose own files have been checked.

        Raises:
            UserError: artifacts or a draft are missing or wrong, or the ratio cannot be reached.
        """

    def open(
        self, asked: Asked, adapter: Adapter, method: M, prior: Prior | None = None
    ) -> AbstractContextManager[OpenMethod]:
        """Install the method on a loaded model for the length of a `with` block; the model is restored behind it.

        Args:
            asked: settled by `normalise`.
            adapter: the model.
            method: the method, as `resolve` returned it.
            prior: the calibrated prior, for methods that need one.
        """

    def prompt_reducer(self, method: M) -> TokenReducer | None:
        """Return what shortens the prompt of one engine session; None where answers come otherwise."""

    def why_no_paired_timing(self, asked: Asked, method: M) -> str | None:
        """Return why a run has no speed-up on the unreduced model; None if it can be measured."""

    def account(self, asked: Asked, method: M, records: Sequence[Record]) -> Account:
        """Return what the row says of these samples, each verified against what was asked.

        Raises:
            BudgetMismatch: a sample kept another number of tokens than asked.
        """

    def identity(self, asked: Asked, method: M) -> Identity:
        """Return what the key, the settings block and the label of the row say of the method."""
