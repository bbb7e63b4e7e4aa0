"""One question put to the target: its inputs, its side of the decoding, and what came of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from espalier.harness.decoding.speculative.cached_model import CachedModel, common_length
from espalier.harness.decoding.speculative.decoding_record import Mismatch, Spent
from espalier.harness.decoding.speculative.meter import Meter
from espalier.harness.decoding.speculative.position_random import RandomNumbers
from espalier.harness.decoding.speculative.samplers import sampler_of
from espalier.harness.decoding.speculative.trace import Trace
from espalier.harness.engine.session import PrefillResult, Session
from espalier.harness.engine.text.cuda_graphs import Graphs
from espalier.harness.models.chat_media import Chat


@dataclass(frozen=True)
class Question:
    """One chat, ready to be answered."""

    inputs: Mapping[str, Any]
    chat: Chat
    sample: str
    config: GenerationConfig
    numbers: RandomNumbers

    @classmethod
    def of(
        cls, inputs: Mapping[str, Any], sample: str, config: GenerationConfig, run_seed: int
    ) -> Question:
        """Return the question of one encoded chat (`inputs["chats"]`); its random numbers are the run's and its own."""
        seed = hashlib.blake2b(f"{run_seed}/{sample}".encode(), digest_size=4).digest()
        return cls(
            inputs={name: value for name, value in inputs.items() if name != "chats"},
            chat=inputs["chats"][0],
            sample=sample,
            config=config,
            numbers=RandomNumbers(int.from_bytes(seed, "big")),
        )


@dataclass(frozen=True)
class Answer:
    """What one way of decoding made of a question."""

    trace: Trace
    spent: Spent
    prefilled: PrefillResult
    draft_visual: float = 0.0


class Target:
    """The target's side of one question.

    Args:
        session: reads the prompt.
        question: the question.
        room: as in `CachedModel`.
        graphs: as in `CachedModel`.
    """

    def __init__(
        self, session: Session, question: Question, room: int, graphs: Graphs | None = None
    ) -> None:
        adapter, inputs = session.adapter, question.inputs

        self.prefilled: PrefillResult
        #: When the prompt had been run, by the clock of time.perf_counter.
        self.ready = 0.0

        def prefill(cache: Cache) -> tuple[Tensor, Tensor]:
            self.prefilled = session.prefilled(inputs, cache, question.sample)
            Meter.of(adapter.devices).rest()
            self.ready = time.perf_counter()
            return self.prefilled.logits, self.prefilled.next

        sampler = sampler_of(adapter, question.config, inputs["input_ids"])
        self.side = CachedModel(adapter, sampler, room, prefill, graphs)
        layout = session.layout(inputs)
        #: (N,) places of the visual tokens in the prompt.
        self.visual = layout.visual[0, : layout.counts[0]]


def mismatch_of(
    target: Callable[[], Target], found: Sequence[int], plain: Sequence[int]
) -> Mismatch | None:
    """Return where two answers part, and by how much the target prefers its own token there; None if they are equal.

    Args:
        target: prefills the target once more, which only answers that differ need.
        found: the answer.
        plain: that of plain decoding.
    """
    place = common_length(found, plain)
    if place == len(found) == len(plain):
        return None
    if place in (len(found), len(plain)):
        return Mismatch(place, float("inf"))  # one of them goes on where the other has ended
    logits = target().side.behind(plain[:place]).float()
    return Mismatch(place, float((logits[plain[place]] - logits[found[place]]).abs()))
