"""A drafter in a process of its own, on its own core, so that drafting and verifying really go on at the same time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import torch

from espalier.harness.decoding.speculative.acceptance import Row
from espalier.harness.decoding.speculative.drafts import NOTHING, Draft
from espalier.harness.decoding.speculative.guidance import Guidance
from espalier.harness.decoding.speculative.main_guard import check_script
from espalier.harness.decoding.speculative.meter import Lap, Meter
from espalier.harness.decoding.speculative.state_machine import READING, Drafter, DrafterLost, Timed
from espalier.harness.decoding.speculative.transports import alone
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


#: Builds a drafter inside its process; it travels by name.
Factory = Callable[[], Drafter]

#: Seconds that a process has to end by itself before it is killed.
GRACE = 2.0


class Processes:
    """A transport whose drafter answers from another process; the verifier stays in this one.

    Use it as a context manager, and give the machine `drafter` and the transport itself. Ids cross the pipe, the answer
    so far one way, drafted tokens the other, and of a draft that samples the rows it drew from.

    Args:
        factory: builds the drafter, in its own process.
        patience: seconds to wait for a draft; for one that begins with a prompt, and for the reading of a chat,
            `READING` times as long. A process that dies is noticed at once.
        cores: core numbers for this process and for the drafter's; None leaves both where they are.
        target: times the verifier.
        start: seconds to wait for the factory.

    Raises:
        DrafterLost: the process died or did not answer in time, on start and at any call after.
        UserError: what the drafter was asked cannot work; it lives on.
    """

    def __init__(
        self,
        factory: Factory,
        patience: float = 30.0,
        cores: tuple[Collection[int], Collection[int]] | None = None,
        start: float = 600.0,
        target: Meter | None = None,
    ) -> None:
        self._factory = factory
        self._patience = patience
        self._cores = cores
        self._start = start
        self._own_cores: Collection[int] | None = None
        self._asked = 0
        self._unread = False
        self._allowed = patience
        self._target = target or Meter()
        #: Devices on which the drafter works.
        self.devices: tuple[torch.device, ...] = ()
        #: Why the drafter is gone; None while it is there.
        self.lost: str | None = None

    def __enter__(self) -> Processes:
        """Start the process and wait until its drafter is built.

        Raises:
            UserError: the user's script has no guard, or the drafter cannot be built.
        """
        check_script()
        context = get_context("spawn")
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        its_cores = None if self._cores is None else self._cores[1]
        self._process = context.Process(
            target=serve, args=(theirs, self._factory, its_cores), daemon=True
        )
        self._process.start()
        theirs.close()  # or the end of the process would not be the end of the pipe
        try:
            built = self._receive(self._start)
            if isinstance(built, UserError):
                raise built
            self.devices = tuple(torch.device(name) for name in built)
        except (DrafterLost, UserError, KeyboardInterrupt):
            self.close()
            raise
        if self._cores is not None:
            self._own_cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cores[0])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process; nothing of it is left behind, whatever state it is in."""
        self.close()

    def close(self) -> None:
        """End the process: by word, by a signal, by force."""
        if self._own_cores is not None:
            os.sched_setaffinity(0, self._own_cores)
            self._own_cores = None
        self._pipe.close()
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def process_id(self) -> int | None:
        """Of the drafter."""
        return self._process.pid

    @property
    def drafter(self) -> Remote:
        """A drafter whose answers come from the process; the transport collects them."""
        return Remote(self)

    # ------------------------------------------------------------------ messages

    def ask(self, what: str, *arguments: Any) -> None:
        """Ask for an answer without waiting for it."""
        self._asked += 1
        self._unread = self._unread or what == "begin"
        self._allowed = self._patience * (READING if self._unread else 1)
        if what in ("start", "draft"):
            self._unread = False
        self._send((what, self._asked, arguments))

    def tell(self, guidance: Guidance) -> None:
        """Hand on what the target chose; nothing is answered."""
        self._send(guide_request(guidance))

    def answer(self) -> tuple[Packed | None, Lap]:
        """Return what was asked for last, and the seconds that it took the process, waiting for guidance left out."""
        while True:
            number, found, lap = self._receive(self._allowed)
            if number != self._asked:
                continue  # to a question whose asker has failed since
            if isinstance(found, UserError):
                raise found
            return found, lap

    def _draft(self) -> tuple[Draft, Lap]:
        packed, lap = self.answer()
        assert packed is not None  # a draft was asked for
        return unpack(packed), lap

    def _send(self, request: Request) -> None:
        try:
            self._pipe.send(request)
        except OSError as error:
            raise self._gone(self._why()) from error

    def _receive(self, patience: float) -> Any:
        try:
            if not self._pipe.poll(patience):
                self._process.kill()
                raise self._gone(f"the drafter did not answer within {patience:g} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone(self._why()) from error

    def _gone(self, why: str) -> DrafterLost:
        self.lost = why
        return DrafterLost(why)

    def _why(self) -> str:
        self._process.join(GRACE)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        return f"the drafter's process ended by {how}"

    # ------------------------------------------------------------------ transport

    def in_turn(self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]) -> Timed:
        """Draft there, then verify here."""
        start = time.perf_counter()
        draft()
        proposed, drafting = self._draft()
        found, verifying = self._target.run(lambda: rows(proposed))
        return Timed(proposed, found, time.perf_counter() - start, drafting, verifying)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> Timed:
        """Draft there while verifying here."""
        start = time.perf_counter()
        draft()
        found, verifying = self._target.run(rows)
        proposed, drafting = self._draft()
        return Timed(proposed, found, time.perf_counter() - start, drafting, verifying)

    def alone(self, rows: Callable[[], Sequence[Row]]) -> Timed:
        """Verify here."""
        return alone(rows, self._target)


class Remote:
    """The far end of `Processes`: asking for a draft returns at once, the transport collects the answer."""

    def __init__(self, transport: Processes) -> None:
        self._transport = transport

    def begin(self, order: Any) -> None:
        """Prepare for an answer, and wait until that is done."""
        self._transport.ask("begin", order)
        self._transport.answer()

    def start(self) -> None:
        """Have the prompt run, and wait until that is done."""
        self._transport.ask("start")
        self._transport.answer()

    def guide(self, guidance: Guidance) -> None:
        """Hand on what the target chose."""
        self._transport.tell(guidance)

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Ask."""
        self._transport.ask("draft", list(tokens), count)
        return NOTHING
