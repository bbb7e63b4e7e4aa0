"""A drafter in a process of its own, on its own core, so that drafting and verifying really go on at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType

from torch import Tensor

from harness.decoding.drafts import Draft
from harness.decoding.machine import Drafter, DrafterLost, Timed
from harness.decoding.transports import NOTHING

#: Builds a drafter inside its process; a function of a module, for it travels by name.
Factory = Callable[[], Drafter]

#: Seconds that a process has to end by itself before it is killed.
GRACE = 2.0


class Processes:
    """A transport whose drafter answers from another process; the verifier stays in this one.

    Use it as a context manager, and give the machine `drafter` and the transport itself. Only ids cross the pipe: the
    answer so far one way, drafted tokens the other.

    Args:
        factory: builds the drafter, in its own process.
        patience: seconds to wait for any answer of the drafter.
        cores: core numbers for this process and for the drafter's; None leaves both where they are.
        start: seconds to wait for the factory.

    Raises:
        DrafterLost: the process died or did not answer in time, on start and at any call after.
    """

    def __init__(
        self,
        factory: Factory,
        patience: float = 10.0,
        cores: tuple[Collection[int], Collection[int]] | None = None,
        start: float = 120.0,
    ) -> None:
        self._factory = factory
        self._patience = patience
        self._cores = cores
        self._start = start
        self._own_cores: Collection[int] | None = None

    def __enter__(self) -> Processes:
        """Start the process and wait until its drafter is built."""
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        its_cores = None if self._cores is None else self._cores[1]
        self._process = context.Process(
            target=serve, args=(theirs, self._factory, its_cores), daemon=True
        )
        self._process.start()
        theirs.close()  # or the end of the process would not be the end of the pipe
        try:
            self._receive(self._start)
        except DrafterLost:
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
    def drafter(self) -> Drafter:
        """A drafter whose answers come from the process; alone it is asked and waited for."""
        return Remote(self)

    # ------------------------------------------------------------------ messages

    def ask(self, tokens: Sequence[int], count: int) -> None:
        """Ask for a draft without waiting for it."""
        try:
            self._pipe.send((list(tokens), count))
        except OSError as error:
            raise DrafterLost(self._why()) from error

    def answer(self) -> tuple[Draft, float]:
        """Return the draft asked for, and the seconds that the process was busy with it."""
        found, seconds = self._receive(self._patience)
        return Draft(tuple(found)), seconds

    def _receive(self, patience: float) -> tuple[list[int], float]:
        try:
            if not self._pipe.poll(patience):
                self._process.kill()
                raise DrafterLost(f"the drafter did not answer within {patience:g} s")
            message: tuple[list[int], float] = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise DrafterLost(self._why()) from error
        return message

    def _why(self) -> str:
        self._process.join(GRACE)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        return f"the drafter's process ended by {how}"

    # ------------------------------------------------------------------ transport

    def in_turn(
        self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Tensor]]
    ) -> Timed:
        """Draft there, then verify here."""
        start = time.perf_counter()
        draft()
        proposed, drafting = self.answer()
        between = time.perf_counter()
        found = rows(proposed)
        end = time.perf_counter()
        return Timed(proposed, found, end - start, drafting, end - between)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Tensor]]) -> Timed:
        """Draft there while verifying here."""
        start = time.perf_counter()
        draft()
        found = rows()
        verified = time.perf_counter()
        proposed, drafting = self.answer()
        return Timed(proposed, found, time.perf_counter() - start, drafting, verified - start)

    def alone(self, rows: Callable[[], Sequence[Tensor]]) -> Timed:
        """Verify here."""
        start = time.perf_counter()
        found = rows()
        seconds = time.perf_counter() - start
        return Timed(NOTHING, found, seconds, 0.0, seconds)


class Remote:
    """The far end of `Processes`: asking for a draft returns at once, the transport collects the answer."""

    def __init__(self, transport: Processes) -> None:
        self._transport = transport

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Ask."""
        self._transport.ask(tokens, count)
        return NOTHING


def serve(pipe: Connection, factory: Factory, cores: Collection[int] | None) -> None:
    """Answer until the other end closes the pipe."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    drafter = factory()
    pipe.send(([], 0.0))
    while True:
        try:
            tokens, count = pipe.recv()
        except EOFError:
            return
        start = time.perf_counter()
        found = drafter.draft(tokens, count).tokens
        pipe.send((list(found), time.perf_counter() - start))
