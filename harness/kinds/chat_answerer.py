"""An adapter and a session as one thing that answers chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from espalier.harness.kinds.kind import Generator, Prepare
from espalier.harness.kinds.rescore import Rescored

if TYPE_CHECKING:
    from torch import Tensor

    from espalier.harness.engine.record import Generated
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.models.chat_media import Chat


@dataclass(frozen=True)
class Joined:
    """Answers chats: `adapter` encodes and decodes, `generator` generates on the same model."""

    adapter: Adapter
    generator: Generator

    @classmethod
    def of(cls, adapter: Adapter, generator: Generator, rescore: bool) -> Joined:
        """Return the two as one; with `rescore` the whole model judges every answer."""
        return cls(adapter, Rescored(adapter, generator) if rescore else generator)

    def encode(self, chats: Sequence[Chat]) -> dict[str, Any]:
        """Return the inputs of one batch of chats."""
        return self.adapter.encode(chats)

    def preparer(self) -> Prepare:
        """Return what prepares chats in another thread."""
        return self.adapter.thread_copy.prepare

    def moved(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return prepared inputs on the model's device."""
        return self.adapter.to_device(inputs)

    def decode(self, ids: Tensor) -> list[str]:
        """Turn (B, T) new tokens into answers."""
        return self.adapter.decode(ids)

    def told(self, chat: Chat) -> dict[str, str | None]:
        """Return what a row says of prompts, by the example of a chat."""
        return self.adapter.prompt_summary(chat)

    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> Generated:
        """Answer one left-padded batch; `samples` has an id for each row."""
        return self.generator.generate(inputs, samples, **generation)
