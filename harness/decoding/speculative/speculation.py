"""Answers by speculative decoding: what an evaluation opens in place of an engine session for a `Decoder`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord, Spent, Steps
from espalier.harness.decoding.speculative.device_places import devices_of, one_gpu, transport_of
from espalier.harness.decoding.speculative.draft_model import Order, draft_of
from espalier.harness.decoding.speculative.drafters import Answering, Partner, open_partner
from espalier.harness.decoding.speculative.forward_times import ROOM, WindowChoice, steps_of
from espalier.harness.decoding.speculative.guidance import Guidance, Onlooker
from espalier.harness.decoding.speculative.meter import Meter
from espalier.harness.decoding.speculative.samplers import ends_of, limit_of, prepared, rule_of
from espalier.harness.decoding.speculative.state_machine import DrafterLost, Machine
from espalier.harness.decoding.speculative.target_request import (
    Answer,
    Question,
    Target,
    mismatch_of,
)
from espalier.harness.decoding.speculative.transports import Sequential
from espalier.harness.engine.record import Generated
from espalier.harness.engine.session import Session
from espalier.harness.engine.text.cuda_graphs import graphs_for
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.chat_media import Chat
from espalier.harness.specs.run_spec import Asked
from espalier.methods.base import Decoder
from espalier.methods.none import NoReduction


class Speculation:
    """A target and its draft, ready for one question after another; use it as a context manager.

    It takes the place of the adapter (`encode`, `decode`) and of the session (`generate`) in an evaluation.

    Args:
        spec: what is asked of the two.
        adapter: the loaded target.
        method: the decoder.
        draft: the draft, where it is loaded already.

    Raises:
        UserError: target and draft do not go together, or the draft cannot be loaded.
        DrafterLost: the draft's process could not be started.
    """

    def __init__(
        self, spec: Asked, adapter: Adapter, method: Decoder, draft: Adapter | None = None
    ) -> None:
        self._spec = spec
        self._loaded = draft
        self._adapter = adapter
        self._method = method
        self._stack = ExitStack()
        self.window = WindowChoice(method.window)
        self._answered = 0
        self._by_itself = Sequential(Meter.of(adapter.devices))

    def __enter__(self) -> Speculation:
        """Open the target's sessions, and start whoever drafts."""
        spec, method, adapter = self._spec, self._method, self._adapter
        self._graphs = graphs_for(adapter, spec.engine.graphs)
        separators = spec.engine.separators
        opened_as = partial(Session, adapter, seed=spec.seed, separators=separators)
        plain = opened_as(NoReduction(), Budget("kept", 0.0))
        self._plain = self._stack.enter_context(plain)
        self._looking = self._plain
        if method.guided:
            onlooker = Onlooker(method, self._tell)
            looking = opened_as(onlooker, spec.budget)
            self._looking = self._stack.enter_context(looking)
        engine, draft = spec.engine, draft_of(spec, method)
        self.transport = "sequential"
        self._apart = True
        if draft is not None:
            there = devices_of(draft.model)
            self.transport = transport_of(engine.transport, method.overlap, adapter.devices, there)
            self._apart = self.transport != "threads" or not one_gpu(adapter.devices, there)
        opened = open_partner(
            draft, adapter, method.source, self.transport, engine.patience, self._loaded
        )
        self._partner: Partner = self._stack.enter_context(opened)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the target, and leave nothing of the draft behind."""
        self._stack.close()

    # ------------------------------------------------------------------ as an adapter

    def encode(self, chats: Sequence[Chat]) -> dict[str, Any]:
        """Return the target's inputs, with the chats for the draft to read."""
        return self.moved(self._prepared(self._adapter, chats))

    def preparer(self) -> Callable[[Sequence[Chat]], dict[str, Any]]:
        """Return what prepares chats in another thread."""
        return partial(self._prepared, self._adapter.thread_copy)

    def moved(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return prepared inputs on the target's device."""
        return self._adapter.to_device(inputs)

    def told(self, chat: Chat) -> dict[str, str | None]:
        """Return what a row says of the target's prompts."""
        return self._adapter.prompt_summary(chat)

    def decode(self, ids: Tensor) -> list[str]:
        """Turn (B, T) new tokens into answers."""
        return self._adapter.decode(ids)

    # ------------------------------------------------------------------ as a session

    @torch.inference_mode()
    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str], **generation: Any
    ) -> Generated:
        """Answer one question; what was measured is in its record, `Record.decoding`.

        Args:
            inputs: what `encode` returned for one chat.
            samples: its id.
            **generation: arguments of transformers' `generate`.

        Raises:
            ValueError: several chats.
            UserError: a setting that cannot be honoured, or a chat that the draft cannot read.
        """
        if len(samples) != 1:
            raise ValueError(f"{len(samples)} chats; speculative decoding answers one at a time")
        config = prepared(self._adapter, generation)
        question = Question.of(inputs, samples[0], config, self._spec.seed)
        if not self.window.measured:
            self.window.timings += self._measured(question)
        own, plain = self._both(question)
        ids = torch.tensor([own.trace.tokens], device=self._adapter.device)
        generated = own.prefilled.finish(ids)
        mismatch = None
        if plain is not None and not config.do_sample:
            mismatch = mismatch_of(
                lambda: self._target(self._plain, question), own.trace.tokens, plain.trace.tokens
            )
        decoded = DecodingRecord(
            gamma=self.window.gamma,
            rounds=tuple(own.trace.rounds),
            spent=own.spent,
            plain=None if plain is None else plain.spent,
            mismatch=mismatch,
            steps=self.window.steps,
            draft_visual=own.draft_visual,
            devices=self._partner.devices,
            target_devices=len(self._adapter.devices),
            apart=self._apart,
            first=self.hides_prefill,
            degraded=own.trace.degraded,
        )
        self.window.note(decoded)
        return self._recorded(generated, own.spent, decoded)

    def _recorded(self, generated: Generated, spent: Spent, decoded: DecodingRecord) -> Generated:
        """Return the answer with the decoder's clock and story in its record."""
        (record,) = generated.records
        times = {
            **record.times_ms,
            "decode": 1000 * spent.decode,
            "decode_per_token": 1000 * spent.decode / max(spent.tokens - 1, 1),
        }
        record = replace(record, requested=(), kept=(), times_ms=times, decoding=decoded.entry())
        return Generated(generated.ids, (record,), None, generated.cache_lengths)

    # ------------------------------------------------------------------ decoding

    @staticmethod
    def _prepared(adapter: Adapter, chats: Sequence[Chat]) -> dict[str, Any]:
        return {**adapter.prepare([list(chat) for chat in chats]), "chats": chats}

    def _both(self, question: Question) -> tuple[Answer, Answer | None]:
        """Answer by the decoder and, if asked, plainly; every other time the other way round."""
        self._answered += 1
        if not self._spec.engine.compare or self._method.source == "nobody":
            return self._speculative(question), None
        if self._answered % 2:
            own = self._speculative(question)
            return own, self._alone(question)
        plain = self._alone(question)
        return self._speculative(question), plain

    def _alone(self, question: Question) -> Answer:
        """Answer plainly, by the same loop, cache and clock."""
        target = self._target(self._plain, question)
        start = time.perf_counter()
        target.side.start()
        rule, ends = rule_of(question.config, question.numbers), ends_of(question.config)
        machine = Machine(None, target.side, rule, self._by_itself, ends=ends)
        trace = machine.run(limit_of(question.config))
        end = time.perf_counter()
        spent = Spent(target.ready - start, 0.0, end - target.ready, len(trace.tokens))
        return Answer(trace, spent, target.prefilled)

    def _speculative(self, question: Question) -> Answer:
        """Answer by the decoder: prefills in turn or at once, then rounds."""
        method, partner = self._method, self._partner
        target = self._target(self._looking, question)
        partner.begin(self._answering(question, target))
        self._told: Guidance | None = None
        start = time.perf_counter()
        if not self.hides_prefill:
            target.side.start()
            partner.start()
        begun = time.perf_counter()
        drafter, gone = partner.drafter, partner.why
        machine = Machine(
            drafter,
            target.side,
            rule_of(question.config, question.numbers),
            partner.transport if drafter is not None else self._by_itself,
            self.window.gamma,
            method.overlap,
            ends_of(question.config),
        )
        trace = machine.run(limit_of(question.config))
        end = time.perf_counter()
        trace.degraded = trace.degraded or gone
        if self.hides_prefill:
            begun = start + trace.rounds[0].seconds
        ready = target.ready
        decode = end - max(begun, ready)
        spent = Spent(ready - start, max(begun - ready, 0.0), decode, len(trace.tokens))
        return Answer(trace, spent, target.prefilled, self._seen(target))

    @property
    def hides_prefill(self) -> bool:
        """Whether the draft's prefill goes on beside the target's: then both are the first round."""
        return self._method.overlap and self.transport != "sequential"

    def _answering(self, question: Question, target: Target) -> Answering:
        room = self._room(question)
        order = Order(question.chat, question.sample, question.config, room, question.numbers)
        return Answering(target.side, target.visual, order)

    def _target(self, session: Session, question: Question) -> Target:
        return Target(session, question, self._room(question), self._graphs)

    def _room(self, question: Question) -> int:
        """Return the longest answer that a cache must hold, drafts included."""
        ahead = 2 * self.window.gamma + len(self._method.tree) + 1
        return max(limit_of(question.config), ROOM) + ahead

    def _tell(self, guidance: Guidance) -> None:
        self._told = guidance
        self._partner.guide(guidance)

    def _seen(self, target: Target) -> float:
        """Return the visual tokens that the draft saw."""
        if self._told is not None:
            return float(self._told.kept.shape[-1])
        if self._method.source == "nobody":
            return 0.0
        return float(self._spec.budget.draft_keep(len(target.visual)))

    # ------------------------------------------------------------------ measuring

    def _measured(self, question: Question) -> list[Steps]:
        """Time both sides at this question's lengths; nothing where nobody drafts, or nobody any more."""
        method, partner = self._method, self._partner
        if method.source == "nobody":
            return []
        target = self._target(self._looking, question)
        partner.begin(self._answering(question, target))
        if partner.why is not None:
            return []
        target.side.start()
        partner.start()
        drafter = partner.drafter
        if drafter is None:
            return []
        levels = self.window.gamma if method.tree else 0
        token = int(question.inputs["input_ids"][0, -1])
        tokens = token, token - 1 if token else 1
        try:
            transport = partner.transport
            return [steps_of(drafter, target.side, transport, method.overlap, levels, tokens)]
        except DrafterLost:
            return []  # the next answer's beginning says why, and starts another
