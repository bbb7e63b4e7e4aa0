"""One request to the target: its inputs, the target's side of the decoding, and the decoded answer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from espalier.harness.decoding.speculative.acceptance import RandomNumbers
from espalier.harness.decoding.speculative.cached_model import CachedModel, common_length
from espalier.harness.decoding.speculative.decoding_record import AnswerTimes, Mismatch
from espalier.harness.decoding.speculative.meter import Meter
from espalier.harness.decoding.speculative.samplers import sampler_of
from espalier.harness.decoding.speculative.trace import DecodingTrace
from espalier.harness.engine.session import PrefillResult, Session
from espalier.harness.engine.text_stack import Graphs
from espalier.harness.models.chat_media import Chat


@dataclass(frozen=True)
class TargetRequest:
    """One chat, prepared for decoding."""

    inputs: Mapping[str, Any]
    chat: Chat
    sample: str
    config: GenerationConfig
    numbers: RandomNumbers

    @classmethod
    def of(
        cls, inputs: Mapping[str, Any], sample: str, config: GenerationConfig, run_seed: int
    ) -> TargetRequest:
        """Return the request of one encoded chat (`inputs["chats"]`), with random numbers of the run and the sample."""
        seed = hashlib.blake2b(f"{run_seed}/{sample}".encode(), digest_size=4).digest()
        return cls(
            inputs={name: value for name, value in inputs.items() if name != "chats"},
            chat=inputs["chats"][0],
            sample=sample,
            config=config,
            numbers=RandomNumbers(int.from_bytes(seed, "big")),
        )


@dataclass(frozen=True)
class DecodedAnswer:
    """The answer of one way of decoding."""

    trace: DecodingTrace
    spent: AnswerTimes
    prefilled: PrefillResult
    draft_visual: float = 0.0


class TargetSide:
    """The target's side of one request.

    Args:
        session: reads the prompt.
        request: the request.
        room: as in `CachedModel`.
        graphs: as in `CachedModel`.
    """

    def __init__(
        self, session: Session, request: TargetRequest, room: int, graphs: Graphs | None = None
    ) -> None:
        adapter, inputs = session.adapter, request.inputs

        self.prefilled: PrefillResult
        #: End of the prefill, by the clock of time.perf_counter.
        self.ready = 0.0

        def prefill(cache: Cache) -> tuple[Tensor, Tensor]:
            self.prefilled = session.prefilled(inputs, cache, request.sample)
            Meter.of(adapter.devices).wait()
            self.ready = time.perf_counter()
            return self.prefilled.logits, self.prefilled.next

        sampler = sampler_of(adapter, request.config, inputs["input_ids"])
        self.side = CachedModel(adapter, sampler, room, prefill, graphs)
        layout = session.layout(inputs)
        #: (N,) positions of the visual tokens in the prompt.
        self.visual = layout.visual[0, : layout.counts[0]]


def mismatch_of(
    make_target: Callable[[], TargetSide], answer: Sequence[int], plain: Sequence[int]
) -> Mismatch | None:
    """Return where two answers diverge and the target's logit gap there; None if they are equal.

    Args:
        make_target: prefills the target once more, only needed for answers that differ.
        answer: the answer.
        plain: the answer of plain decoding.
    """
    place = common_length(answer, plain)
    if place == len(answer) == len(plain):
        return None
    if place in (len(answer), len(plain)):
        return Mismatch(place, float("inf"))  # one answer continues where the other has ended
    logits = make_target().side.logits_after(plain[:place]).float()
    return Mismatch(place, float((logits[plain[place]] - logits[answer[place]]).abs()))
