"""Answers by speculative decoding: an evaluation opens `Speculation` in place of an engine session for a `Decoder`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.cached_model import CachedModel, common_length
from espalier.harness.decoding.speculative.decoding_record import (
    AnswerTimes,
    DecodingRecord,
    DecodingTrace,
    ForwardTimes,
    Mismatch,
)
from espalier.harness.decoding.speculative.draft_model import DraftRequest, draft_of
from espalier.harness.decoding.speculative.drafters import (
    DraftProvider,
    ProcessDraft,
    devices_of,
    one_gpu,
    open_provider,
    transport_of,
)
from espalier.harness.decoding.speculative.drafts import RandomNumbers
from espalier.harness.decoding.speculative.forward_times import ROOM, WindowChoice, measure_forwards
from espalier.harness.decoding.speculative.guidance import Guidance, GuidanceReader
from espalier.harness.decoding.speculative.samplers import (
    limit_of,
    resolved_config,
    rule_of,
    sampler_of,
)
from espalier.harness.decoding.speculative.state_machine import DrafterLost, Machine, Meter
from espalier.harness.decoding.speculative.transports import SequentialTransport
from espalier.harness.engine.model_parts import ends_of
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.engine.session import PrefillResult, Session
from espalier.harness.engine.text_stack import Graphs, graphs_for
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.chat_media import Chat
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import Decoder
from espalier.methods.none import NoReduction


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
        inputs: of the encoded chat.
        request: what is asked of both sides.
        graphs: as in `CachedModel`.
    """

    def __init__(
        self,
        session: Session,
        inputs: Mapping[str, Any],
        request: DraftRequest,
        graphs: Graphs | None = None,
    ) -> None:
        adapter = session.adapter
        self.prefilled: PrefillResult
        #: End of the prefill, by the clock of time.perf_counter.
        self.ready = 0.0

        def prefill(cache: Cache) -> tuple[Tensor, Tensor]:
            self.prefilled = session.prefilled(inputs, cache, request.sample)
            Meter.of(adapter.devices).wait()
            self.ready = time.perf_counter()
            return self.prefilled.logits, self.prefilled.next

        sampler = sampler_of(adapter, request.config, inputs["input_ids"])
        self.side = CachedModel(adapter, sampler, request.room, prefill, graphs)
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


def with_chats(adapter: Adapter, chats: Sequence[Chat]) -> Mapping[str, Any]:
    """Return the target's inputs of some chats in memory, with the chats for the draft to read."""
    return {**adapter.prepare([list(chat) for chat in chats]), "chats": chats}


class Speculation:
    """A target and its draft, ready for one request after another; use it as a context manager.

    It replaces the session (`generate`) in an evaluation.

    Args:
        spec: settings of the run.
        adapter: the loaded target.
        method: the decoder.
        draft: the draft, if it is already loaded.

    Raises:
        UserError: target and draft do not fit together, or the draft cannot be loaded.
        DrafterLost: the draft's process could not be started.
    """

    def __init__(
        self, spec: AnswerRequest, adapter: Adapter, method: Decoder, draft: Adapter | None = None
    ) -> None:
        self._spec = spec
        self._loaded_draft = draft
        self._adapter = adapter
        self._method = method
        self._stack = ExitStack()
        self.window = WindowChoice(method.window)
        self._answer_count = 0
        self._without_draft = SequentialTransport(Meter.of(adapter.devices))

    def __enter__(self) -> Speculation:
        """Open the target's sessions and start the draft."""
        spec, method, adapter = self._spec, self._method, self._adapter
        self._graphs = graphs_for(adapter, spec.engine.graphs)
        open_session = partial(Session, adapter, seed=spec.seed, separators=spec.engine.separators)
        plain = open_session(NoReduction(), Budget("kept", 0.0))
        self._plain_session = self._stack.enter_context(plain)
        self._guided_session = self._plain_session
        if method.guided:
            guided_session = open_session(GuidanceReader(method, self._take_guidance), spec.budget)
            self._guided_session = self._stack.enter_context(guided_session)
        engine, draft = spec.engine, draft_of(spec, method)
        self.transport = "sequential"
        self._own_clocks = True
        if draft is not None:
            draft_devices = devices_of(draft.model)
            self.transport = transport_of(
                engine.transport, method.overlap, adapter.devices, draft_devices
            )
            self._own_clocks = self.transport != "threads" or not one_gpu(
                adapter.devices, draft_devices
            )
        provider = open_provider(
            draft, adapter, method.source, self.transport, engine.patience, self._loaded_draft
        )
        self._provider: DraftProvider | ProcessDraft = self._stack.enter_context(provider)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the target and end the draft."""
        self._stack.close()

    @torch.inference_mode()
    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> GeneratedBatch:
        """Answer one request; measurements are in its record, `Record.decoding`.

        Args:
            inputs: of one chat, prepared `with_chats`.
            samples: its id.
            **generation: arguments of transformers' `generate`.

        Raises:
            ValueError: several chats.
            UserError: a setting that is not supported, or a chat that the draft cannot read.
        """
        if len(samples) != 1:
            raise ValueError(f"{len(samples)} chats; speculative decoding answers one at a time")
        config = resolved_config(self._adapter, generation)
        seed = hashlib.blake2b(f"{self._spec.seed}/{samples[0]}".encode(), digest_size=4).digest()
        numbers = RandomNumbers(int.from_bytes(seed, "big"))
        (chat,) = inputs["chats"]
        inputs = {name: value for name, value in inputs.items() if name != "chats"}
        request = DraftRequest(chat, samples[0], config, self._room(config), numbers)
        if not self.window.measured:
            self.window.timings += self._forward_times(inputs, request)
            request = replace(request, room=self._room(config))
        answer, plain = self._answers(inputs, request)
        ids = torch.tensor([answer.trace.tokens], device=self._adapter.device)
        generated = answer.prefilled.finish(ids)
        mismatch = None
        if plain is not None and not config.do_sample:
            mismatch = mismatch_of(
                lambda: TargetSide(self._plain_session, inputs, request, self._graphs),
                answer.trace.tokens,
                plain.trace.tokens,
            )
        decoding = DecodingRecord(
            gamma=self.window.gamma,
            rounds=tuple(answer.trace.rounds),
            spent=answer.spent,
            plain=None if plain is None else plain.spent,
            mismatch=mismatch,
            steps=self.window.steps,
            draft_visual=answer.draft_visual,
            devices=self._provider.devices,
            target_devices=len(self._adapter.devices),
            apart=self._own_clocks,
            in_turn=self._method.overlap and not self._overlaps(request),
            first=self.hides_prefill,
            degraded=answer.trace.degraded,
        )
        self.window.note(decoding)
        (record,) = generated.records
        times = {
            **record.times_ms,
            "decode": 1000 * answer.spent.decode,
            "decode_per_token": 1000 * answer.spent.decode / max(answer.spent.tokens - 1, 1),
        }
        record = replace(record, requested=(), kept=(), times_ms=times, decoding=decoding.entry())
        return GeneratedBatch(generated.ids, (record,), None, generated.cache_lengths)

    # ------------------------------------------------------------------ decoding

    def _answers(
        self, inputs: Mapping[str, Any], request: DraftRequest
    ) -> tuple[DecodedAnswer, DecodedAnswer | None]:
        """Answer by the decoder and, if `engine.compare`, plainly, one and the other first in turn."""
        self._answer_count += 1
        if not self._spec.engine.compare or self._method.source == "nobody":
            return self._drafted_answer(inputs, request), None
        if self._answer_count % 2:
            answer = self._drafted_answer(inputs, request)
            return answer, self._plain_answer(inputs, request)
        plain = self._plain_answer(inputs, request)
        return self._drafted_answer(inputs, request), plain

    def _plain_answer(self, inputs: Mapping[str, Any], request: DraftRequest) -> DecodedAnswer:
        """Answer plainly, with the same loop, cache and clock."""
        target = TargetSide(self._plain_session, inputs, request, self._graphs)
        start = time.perf_counter()
        target.side.start()
        rule, ends = rule_of(request.config, request.numbers), ends_of(request.config)
        machine = Machine(None, target.side, rule, self._without_draft, ends=ends)
        trace = machine.run(limit_of(request.config))
        end = time.perf_counter()
        spent = AnswerTimes(target.ready - start, 0.0, end - target.ready, len(trace.tokens))
        return DecodedAnswer(trace, spent, target.prefilled)

    def _drafted_answer(self, inputs: Mapping[str, Any], request: DraftRequest) -> DecodedAnswer:
        """Answer by the decoder: prefills one after the other or at the same time, then rounds."""
        provider = self._provider
        target = TargetSide(self._guided_session, inputs, request, self._graphs)
        provider.begin(request, target.side, target.visual)
        self._guidance: Guidance | None = None
        overlap = self._overlaps(request)
        start = time.perf_counter()
        if not self.hides_prefill:
            target.side.start()
            provider.start()
        begun = time.perf_counter()
        drafter, loss = provider.drafter, provider.loss
        machine = Machine(
            drafter,
            target.side,
            rule_of(request.config, request.numbers),
            provider.transport if drafter is not None else self._without_draft,
            self.window.gamma,
            overlap,
            ends_of(request.config),
        )
        trace = machine.run(limit_of(request.config))
        end = time.perf_counter()
        trace.degraded = trace.degraded or loss
        if self.hides_prefill:
            begun = start + trace.rounds[0].seconds
        ready = target.ready
        decode = end - max(begun, ready)
        spent = AnswerTimes(ready - start, max(begun - ready, 0.0), decode, len(trace.tokens))
        return DecodedAnswer(trace, spent, target.prefilled, self._draft_visual(target))

    @property
    def hides_prefill(self) -> bool:
        """Whether the draft's prefill runs during the target's: then both form the first round."""
        return self._method.overlap and self.transport != "sequential"

    def _overlaps(self, request: DraftRequest) -> bool:
        """Whether rounds draft and verify at once.

        They do not if `engine.transport=auto` finds one processor: rounds in turn lose no drafts there. Sampled
        answers keep to their rounds, so that their random numbers do not depend on the machine.
        """
        taking_turns = self._spec.engine.transport == "auto" and self.transport == "sequential"
        return self._method.overlap and (request.config.do_sample or not taking_turns)

    def _room(self, config: GenerationConfig) -> int:
        """Return the longest answer that a cache must hold, drafted tokens included."""
        ahead = 2 * self.window.gamma + len(self._method.tree) + 1
        return max(limit_of(config), ROOM) + ahead

    def _take_guidance(self, guidance: Guidance) -> None:
        self._guidance = guidance
        self._provider.guide(guidance)

    def _draft_visual(self, target: TargetSide) -> float:
        """Return the number of visual tokens that the draft saw."""
        if self._guidance is not None:
            return float(self._guidance.kept.shape[-1])
        if self._method.source == "nobody":
            return 0.0
        return float(self._spec.budget.draft_keep(len(target.visual)))

    # ------------------------------------------------------------------ measuring

    def _forward_times(
        self, inputs: Mapping[str, Any], request: DraftRequest
    ) -> list[ForwardTimes]:
        """Time both sides at this request's lengths; empty if there is no draft or it was lost."""
        method, provider = self._method, self._provider
        if method.source == "nobody":
            return []
        target = TargetSide(self._guided_session, inputs, request, self._graphs)
        provider.begin(request, target.side, target.visual)
        if provider.loss is not None:
            return []
        target.side.start()
        provider.start()
        drafter = provider.drafter
        if drafter is None:
            return []
        levels = self.window.gamma if method.tree else 0
        token = int(inputs["input_ids"][0, -1])
        tokens = token, token - 1 if token else 1
        sides = drafter, target.side, provider.transport
        try:
            return [measure_forwards(*sides, method.overlap, levels, tokens)]
        except DrafterLost:
            return []  # the next answer reports the loss and starts a new process
