"""The state machine of speculative decoding: which tokens are verified, which only drafted, and the next step.

It is independent of any model. Drafter and verifier are functions of the answer so far; they cut their caches back to
the part that is still valid. A round has two modes:

    in turn    draft gamma tokens, then one forward of the target judges all of them and adds one of its own
    at once    the drafter continues after the unverified tokens while the target judges these; then both results
               are compared, including the first of the new tokens

At once unites PEARL's pre-verify (nothing pending: one token is judged) and post-verify (gamma - 1 pending: gamma are
judged) in one rule. A rejected token discards all tokens drafted after it. Only verified tokens leave the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from espalier.harness.cost.clock import drain, elapsed_ms, mark
from espalier.harness.decoding.speculative.decoding_record import DecodingTrace, Round
from espalier.harness.decoding.speculative.drafts import Draft, Row, Rule, walk

Result = TypeVar("Result")


@dataclass(frozen=True)
class Lap:
    """Seconds of one piece of work: wall time, and the part in which its processor worked."""

    wall: float
    busy: float


#: The lap of a side without work.
NO_TIME = Lap(0.0, 0.0)


@dataclass(frozen=True)
class Meter:
    """Measures one side's work where it runs, down to its last kernel.

    On a CPU busy is the processor time of the calling thread: a side that waits for a core is not busy, however long
    its round takes. (The thread that drives a step takes part in all of its parallel regions, so other threads need no
    counting.) On GPUs it is the time between two events in the side's own stream. Only that stream is synchronized, and
    the wall time ends when its work is done, not when it is launched.

    Attributes:
        devices: GPUs on which the side works, in any order; empty on a CPU.
    """

    devices: tuple[torch.device, ...] = ()

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Meter:
        """Return the meter of a side on these devices."""
        return cls(tuple(device for device in devices if device.type == "cuda"))

    def run(self, work: Callable[[], Result]) -> tuple[Result, Lap]:
        """Do the work and return its result and its times. Cost: two events per GPU, a microsecond elsewhere."""
        start, began = time.perf_counter(), time.thread_time()
        before = mark(self.devices)
        result = work()
        busy = time.thread_time() - began
        if self.devices:
            busy = elapsed_ms(before, mark(self.devices)) / 1000
        return result, Lap(time.perf_counter() - start, busy)

    def wait(self) -> None:
        """Wait until this side's own streams have finished their work."""
        drain(self.devices)


class Drafter(Protocol):
    """Proposes tokens."""

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Return the continuation of the answer: a chain of `count` tokens, or a tree of that depth."""


class Verifier(Protocol):
    """Evaluates the target."""

    def rows(self, tokens: Sequence[int], draft: Draft) -> Sequence[Row]:
        """Return the target's row after the verified `tokens`, then after each token of `draft`, in one forward."""


#: Factor on the patience for a drafter that reads its chat or starts with its prompt: a video is decoded, resized and
#: run through the tower before the first token.
READING = 20


class DrafterLost(Exception):
    """The drafter died or does not answer; the message states which."""


@dataclass(frozen=True)
class TimedRound:
    """Results of one round and its seconds: the wall time of the round, and the time of each side.

    A side without work has no lap.
    """

    draft: Draft
    rows: Sequence[Row]
    seconds: float
    drafting: Lap = NO_TIME
    verifying: Lap = NO_TIME


class Transport(Protocol):
    """Runs both sides, in whatever thread or process.

    Raises:
        DrafterLost: from `in_turn` and `at_once`; `verify_only` can still verify.
    """

    def in_turn(
        self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]
    ) -> TimedRound:
        """Draft, then verify the draft."""

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Draft and verify at the same time."""

    def verify_only(self, rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Verify without drafting."""


@dataclass(frozen=True)
class Machine:
    """One way of decoding.

    Attributes:
        drafter: proposes tokens; None: the target decodes alone, one token per round.
        verifier: the target.
        rule: decides whether a drafted token is accepted.
        transport: runs both sides and measures their times.
        gamma: tokens drafted in a round.
        overlap: at once instead of in turn.
        ends: tokens that end an answer.
    """

    drafter: Drafter | None
    verifier: Verifier
    rule: Rule
    transport: Transport
    gamma: int = 1
    overlap: bool = False
    ends: Collection[int] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a window below 1."""
        if self.gamma < 1:
            raise ValueError(f"gamma={self.gamma} is out of range; valid: 1 or more")

    def run(self, limit: int) -> DecodingTrace:
        """Decode up to `limit` tokens, or to the first end of sequence.

        Raises:
            ValueError: a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit={limit} is out of range; valid: 1 or more")
        trace, pending = DecodingTrace(), Draft(())
        verified: list[int] = []
        drafter = self.drafter
        checked = 0
        while len(verified) < limit and not set(verified[checked:]) & set(self.ends):
            checked = len(verified)
            try:
                pending = self._round(drafter, verified, pending, trace)
            except DrafterLost as lost:
                drafter, pending, trace.degraded = None, Draft(()), str(lost)
        ends = [index for index, token in enumerate(verified[:limit]) if token in self.ends]
        trace.tokens = verified[: ends[0] + 1 if ends else limit]
        return trace

    def _round(
        self, drafter: Drafter | None, verified: list[int], pending: Draft, trace: DecodingTrace
    ) -> Draft:
        """Play one round, extend `verified`, and return the tokens that are pending after it."""
        verifier, gamma = self.verifier, self.gamma
        if drafter is None:
            timed = self.transport.verify_only(lambda: verifier.rows(verified, pending))
            judged = pending
        elif self.overlap:
            ahead = [*verified, *pending.tokens]
            timed = self.transport.at_once(
                lambda: drafter.draft(ahead, gamma), lambda: verifier.rows(verified, pending)
            )
            judged = pending.joined(timed.draft.part(0, 1))
        else:
            timed = self.transport.in_turn(
                lambda: drafter.draft(verified, gamma),
                lambda draft: verifier.rows(verified, draft),
            )
            judged = timed.draft
        verification = walk(judged, timed.rows, self.rule, len(verified))
        verified += [judged.tokens[node] for node in verification.path]
        if verification.target_token is not None:
            verified.append(verification.target_token)
        trace.rounds.append(
            Round(
                pending=len(pending.tokens),
                drafted=len(timed.draft.tokens),
                checked=len(verification.path) + verification.refused,
                accepted=len(verification.path),
                target_added=verification.target_token is not None,
                seconds=timed.seconds,
                draft_seconds=timed.drafting.wall,
                target_seconds=timed.verifying.wall,
                draft_busy=timed.drafting.busy,
                target_busy=timed.verifying.busy,
            )
        )
        all_accepted = self.overlap and drafter is not None and verification.target_token is None
        return timed.draft.part(1) if all_accepted else Draft(())
