"""One question put to the target: its inputs, its side of the decoding, and what came of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from harness.adapters.chats import Chat
from harness.decoding.chance import Chance
from harness.decoding.graphs import Graphs
from harness.decoding.meter import Meter
from harness.decoding.sides import Side
from harness.decoding.telling import Spent
from harness.decoding.trace import Trace
from harness.decoding.voices import voice_of
from harness.engine.session import Prefilled, Session


@dataclass(frozen=True)
class Question:
    """One chat, ready to be answered."""

    inputs: Mapping[str, Any]
    chat: Chat
    sample: str
    config: GenerationConfig
    chance: Chance

    @classmethod
    def of(
        cls, inputs: Mapping[str, Any], sample: str, config: GenerationConfig, run_seed: int
    ) -> Question:
        """Return the question of one encoded chat (`inputs["chats"]`); its chance is the run's and its own."""
        seed = hashlib.blake2b(f"{run_seed}/{sample}".encode(), digest_size=4).digest()
        return cls(
            inputs={name: value for name, value in inputs.items() if name != "chats"},
            chat=inputs["chats"][0],
            sample=sample,
            config=config,
            chance=Chance(int.from_bytes(seed, "big")),
        )


@dataclass(frozen=True)
class Answer:
    """What one way of decoding made of a question."""

    trace: Trace
    spent: Spent
    prefilled: Prefilled
    draft_visual: float = 0.0


class Target:
    """The target's side of one question.

    Args:
        session: reads the prompt.
        question: the question.
        room: as in `Side`.
        graphs: as in `Side`.
    """

    def __init__(
        self, session: Session, question: Question, room: int, graphs: Graphs | None = None
    ) -> None:
        adapter, inputs = session.adapter, question.inputs

        self.prefilled: Prefilled
        #: When the prompt had been run, by the clock of time.perf_counter.
        self.ready = 0.0

        def prefill(cache: Cache) -> tuple[Tensor, Tensor]:
            self.prefilled = session.prefilled(inputs, cache, question.sample)
            Meter.of(adapter.devices).rest()
            self.ready = time.perf_counter()
            return self.prefilled.logits, self.prefilled.next

        voice = voice_of(adapter, question.config, inputs["input_ids"])
        self.side = Side(adapter, voice, room, prefill, graphs)
        layout = adapter.layout(inputs)
        #: (N,) places of the visual tokens in the prompt.
        self.visual = layout.visual[0, : layout.counts[0]]
