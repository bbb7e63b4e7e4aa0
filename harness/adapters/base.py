"""What every adapter offers, and how one is found and loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.engine.layout import Layout
from harness.errors import UserError
from harness.facts import ModelFacts
from harness.registry import Registry

if TYPE_CHECKING:
    from harness.config.spec import ModelSpec

ADAPTERS = Registry("model.adapter")
ADAPTERS.add("llava", "harness.adapters.llava:LlavaAdapter")

Chat = list[dict[str, Any]]


class Adapter(ABC):
    """The facts of one model family: where its parts are, which positions are visual, how a chat is encoded.

    Args:
        model: a transformers model with `generate`.
        processor: its processor, with a chat template.
        facts: architecture facts out of the config file.
    """

    def __init__(self, model: Any, processor: Any, facts: ModelFacts) -> None:
        """Put the model in inference mode and left padding on the tokenizer."""
        self.model = model.eval()
        self.processor = processor
        self.facts = facts
        processor.tokenizer.padding_side = "left"
        #: Token that fills answers after their end.
        self.pad_id = int(processor.tokenizer.pad_token_id)

    @classmethod
    @abstractmethod
    def load(cls, spec: ModelSpec) -> Adapter:
        """Load weights and processor; raise UserError with the config key if they do not fit."""

    @property
    @abstractmethod
    def decoder(self) -> Any:
        """The text stack: a module with `.layers`, `.config` and the keyword arguments of a decoder."""

    @property
    @abstractmethod
    def tower(self) -> nn.Module:
        """The vision tower."""

    @property
    @abstractmethod
    def projector(self) -> nn.Module:
        """The module that maps tower features (images, patches, D) to visual tokens, one to one."""

    @abstractmethod
    def tower_layer(self, index: int | None) -> Any:
        """Return a tower layer; None means the one whose output the projector reads."""

    @abstractmethod
    def layout(self, inputs: Mapping[str, Any]) -> Layout:
        """Read visual positions, grid coordinates and tower indices off encoded inputs."""

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def encode(self, chats: Sequence[Chat]) -> dict[str, Tensor]:
        """Turn chats into one left-padded batch on the model's device.

        Args:
            chats: each a list of {"role", "content": [{"type": "image", "image": PIL} | {"type": "text", "text"}]}.

        Raises:
            UserError: a chat without an image.
        """
        texts = [
            self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in chats
        ]
        images = [
            [part["image"] for turn in chat for part in turn["content"] if part["type"] == "image"]
            for chat in chats
        ]
        for number, found in enumerate(images):
            if not found:
                raise UserError(f"chat {number} of the batch holds no image")
        batch = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        return {name: self._place(value) for name, value in batch.items()}

    def _place(self, value: Tensor) -> Tensor:
        """Move to the device; pixels also take the model's dtype."""
        if value.is_floating_point():
            return value.to(self.device, self.model.dtype)
        return value.to(self.device)

    def decode(self, ids: Tensor) -> list[str]:
        """Turn (B, T) new tokens into answers without special tokens."""
        texts = self.processor.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


def load_adapter(spec: ModelSpec) -> Adapter:
    """Load the model of a run through its family's adapter.

    Raises:
        UserError: unknown family, missing or unfitting checkpoint.
    """
    adapter: Adapter = ADAPTERS.load(spec.adapter).load(spec)
    return adapter
