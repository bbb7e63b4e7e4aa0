"""What crosses the pipe between target and drafter, and the drafter's end of it.

Tensors cross as arrays: torch would send them through shared memory, which a killed process may leave behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.guidance import Guidance
from espalier.harness.decoding.speculative.meter import Lap, Meter
from espalier.harness.decoding.speculative.state_machine import Drafter
from espalier.harness.errors import UserError
from espalier.methods.base import MethodError

#: What to do, the number that its answer carries (0: no answer is expected), and with what.
Request = tuple[str, int, tuple[Any, ...]]


#: A draft as plain data: tokens, the rows they were drawn from, parents.
Packed = tuple[tuple[int, ...], tuple[np.ndarray | None, ...], tuple[int, ...] | None]


def pack(draft: Draft) -> Packed:
    """Return a draft as plain data."""
    rows = tuple(None if row is None else row.cpu().numpy() for row in draft.rows)
    return draft.tokens, rows, draft.parents


def unpack(packed: Packed) -> Draft:
    """Return the draft again."""
    tokens, rows, parents = packed
    return Draft(
        tokens, tuple(None if row is None else torch.from_numpy(row) for row in rows), parents
    )


def guide_request(guidance: Guidance) -> Request:
    """Return the message that hands on what the target chose; nothing is answered."""
    return "guide", 0, (guidance.kept.cpu().numpy(), guidance.n_tokens)


class Abandoned(Exception):
    """The target asks for something else while guidance was waited for: its prefill has failed."""


class Mailbox:
    """Requests in their order; those that come while one is worked on may be looked at by it."""

    def __init__(self, pipe: Connection, drafter: Any) -> None:
        self._pipe = pipe
        self._drafter = drafter
        self._kept: Request | None = None
        #: Seconds of the current request in which it waited for the target.
        self.waited = 0.0

    def next(self) -> Request:
        """Return the next request; raises EOFError when the other end is closed."""
        request: Request = self._kept or self._pipe.recv()
        self._kept = None
        self.waited = 0.0
        return request

    def listen(self) -> None:
        """Wait for guidance and hand it to the drafter.

        Raises:
            Abandoned: something else came.
        """
        start = time.perf_counter()
        what, number, arguments = self._pipe.recv()
        self.waited += time.perf_counter() - start
        if what != "guide":
            self._kept = (what, number, arguments)
            raise Abandoned
        self.hand_over(arguments)

    def hand_over(self, arguments: tuple[Any, ...]) -> None:
        """Give the drafter what the target chose."""
        self._drafter.guide(Guidance(torch.from_numpy(arguments[0]), arguments[1]))


def serve(pipe: Connection, factory: Callable[[], Drafter], cores: Collection[int] | None) -> None:
    """Answer until the other end closes the pipe.

    The first message names the devices on which the drafter works, none where it does not say. An answer is (number,
    what was asked for or the UserError that says why not, its `Lap`). Any other error ends the process, which the other
    end sees. Ctrl-C, which reaches both ends, is the other one's to answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        drafter: Any = factory()
    except UserError as error:
        pipe.send(error)
        return
    mailbox = Mailbox(pipe, drafter)
    drafter.listen = mailbox.listen
    devices: tuple[torch.device, ...] = getattr(drafter, "devices", ())
    meter = Meter.of(devices)
    pipe.send([str(device) for device in devices])
    while True:
        try:
            what, number, arguments = mailbox.next()
        except EOFError:
            return
        try:
            answer, lap = meter.run(partial(_answer, mailbox, drafter, what, arguments))
        except Abandoned:
            continue
        if number:
            try:
                pipe.send((number, answer, _working(lap, mailbox.waited, bool(meter.devices))))
            except BrokenPipeError:
                return  # nobody waits for the answer any more


def _answer(
    mailbox: Mailbox, drafter: Any, what: str, arguments: tuple[Any, ...]
) -> Packed | UserError | None:
    """Do what a request asks for."""
    try:
        if what == "draft":
            return pack(drafter.draft(*arguments))
        if what == "begin":
            drafter.begin(*arguments)
        elif what == "start":
            drafter.start()
        else:
            mailbox.hand_over(arguments)
    except (UserError, MethodError) as error:
        return UserError(str(error))
    return None


def _working(lap: Lap, waited: float, by_events: bool) -> Lap:
    """Take waiting for the target off a lap; a thread's processor time has none of it, the time between events has."""
    return Lap(lap.wall - waited, max(lap.busy - waited, 0.0) if by_events else lap.busy)
