"""Transports: draft and verify in one thread, in two (on a GPU each with a stream), or in two processes.

Tensors cross the pipe as arrays: torch would send them through shared memory, and a killed process may not free it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.harness.decoding.speculative.drafts import EMPTY_DRAFT, Draft, Row
from espalier.harness.decoding.speculative.guidance import Guidance
from espalier.harness.decoding.speculative.state_machine import (
    READING,
    Drafter,
    DrafterLost,
    Lap,
    Meter,
    Result,
    TimedRound,
)
from espalier.harness.errors import UserError
from espalier.harness.specs.plugins.code_reference import ImportedFiles
from espalier.methods.base import MethodError

#: Waits for a draft under way, and returns it with its seconds.
Pending = Callable[[], tuple[Draft, Lap]]


class SequentialTransport:
    """Both sides in this thread, one after the other, by the wall clock.

    Args:
        target: meter of the target.
        draft: meter of the drafter.
    """

    def __init__(self, target: Meter | None = None, draft: Meter | None = None) -> None:
        self._target, self._draft = target or Meter(), draft or Meter()

    def begin_draft(self, draft: Callable[[], Draft]) -> Pending:
        """Draft here and now; other transports let the drafter work meanwhile."""
        proposed = self._draft.run(draft)
        return lambda: proposed

    def in_turn(
        self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]
    ) -> TimedRound:
        """Draft, then verify."""
        start = time.perf_counter()
        proposed, drafting = self.begin_draft(draft)()
        target_rows, verifying = self._target.run(lambda: rows(proposed))
        return TimedRound(proposed, target_rows, time.perf_counter() - start, drafting, verifying)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Draft while verifying the earlier tokens; in one thread before: the same answer, without the gain."""
        start = time.perf_counter()
        pending = self.begin_draft(draft)
        target_rows, verifying = self._target.run(rows)
        proposed, drafting = pending()
        return TimedRound(proposed, target_rows, time.perf_counter() - start, drafting, verifying)

    def verify_only(self, rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Verify without drafting."""
        target_rows, verifying = self._target.run(rows)
        return TimedRound(EMPTY_DRAFT, target_rows, verifying.wall, verifying=verifying)


class ThreadTransport(SequentialTransport):
    """A transport for two models on one GPU, or on two, without a second process.

    Python runs one thread at a time, so kernels overlap only as far as they are launched ahead of their execution. On
    one GPU, where a step is bound by memory traffic, the gain is limited by the bandwidth that both sides share. On the
    CPU it is only useful for tests.

    Args:
        target: the target's devices, first the device of its inputs.
        draft: the drafter's.
        patience: seconds to wait for a draft after the target has finished.
        reading: returns whether the next draft begins with its prompt, which allows `READING` times as long.

    Raises:
        DrafterLost: a draft did not come in time. Its thread cannot be stopped; it gets no more work.
    """

    def __init__(
        self,
        target: Sequence[torch.device],
        draft: Sequence[torch.device],
        patience: float = 30.0,
        reading: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(Lane.of(target), Lane.of(draft))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
        self._patience = patience
        self._reading = reading
        self._lost = False

    def __enter__(self) -> ThreadTransport:
        return self

    def __exit__(self, *error: object) -> None:
        """End the drafter's thread, unless it hangs."""
        self._pool.shutdown(wait=not self._lost, cancel_futures=True)

    def begin_draft(self, draft: Callable[[], Draft]) -> Pending:
        """Draft in the drafter's thread."""
        if self._lost:
            raise DrafterLost("the drafter's thread hangs")
        patience = self._patience * (READING if self._reading() else 1)
        future = self._pool.submit(self._draft.run, draft)

        def wait() -> tuple[Draft, Lap]:
            try:
                return future.result(timeout=patience)
            except Late as error:
                self._lost = True
                raise DrafterLost(f"the drafter did not answer within {patience:g} s") from error

        return wait


@dataclass(frozen=True)
class Lane(Meter):
    """Measures a side that works in a separate stream on its first GPU, or in the calling thread elsewhere."""

    stream: Any = None

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> Lane:
        """Return the lane of a side on these devices, first the device of its inputs."""
        first, *further_devices = devices
        stream = torch.cuda.Stream(first) if first.type == "cuda" else None
        return cls(Meter.of([first, *further_devices]).devices, stream)

    def run(self, work: Callable[[], Result]) -> tuple[Result, Lap]:
        """Do the work and return its result and its times, which end when the stream has finished."""
        if self.stream is None:
            return super().run(work)
        # Earlier work of the other thread, such as loading weights, is on another stream.
        self.stream.wait_stream(torch.cuda.default_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            return super().run(work)


#: The remedy in each error line.
REMEDY = 'the call below `if __name__ == "__main__":`, or engine.transport=threads'


def check_script() -> None:
    """Refuse a new process that would run the user's script a second time.

    Raises:
        UserError: the script has no guard, or this process is importing the script for another one.
    """
    if getattr(current_process(), "_inheriting", False):
        reason: str | None = "cannot start a process while another one imports the script"
    elif (reason := why_not_imported()) is not None:
        reason = f"starts a process that {reason}"
    if reason is not None:
        raise UserError(f"engine.transport=processes {reason}; valid: {REMEDY}")


def why_not_imported() -> str | None:
    """Return how a new process fails to import the running script; None if it can."""
    main = sys.modules["__main__"]
    module_spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    module_name = getattr(module_spec, "name", None)
    if file is None or module_name == "__main__" or str(module_name).endswith(".__main__"):
        return None  # a notebook, a prompt, `-c` or a package: nothing is imported again
    if not Path(file).is_file():
        return f"imports {file}, which is not a file"
    if b"__name__" not in Path(file).read_bytes():
        return f"runs {file} again, which has no guard"
    return None


#: A verb, the number of its answer (0: no answer is expected), and the arguments.
PipeMessage = tuple[str, int, tuple[Any, ...]]


#: A draft as plain data: tokens, the rows they were drawn from, parents.
Packed = tuple[tuple[int, ...], tuple[np.ndarray | None, ...], tuple[int, ...] | None]


def pack(draft: Draft) -> Packed:
    """Return a draft as plain data."""
    rows = tuple(None if row is None else row.cpu().numpy() for row in draft.rows)
    return draft.tokens, rows, draft.parents


def unpack(packed: Packed) -> Draft:
    """Return the draft of plain data."""
    tokens, rows, parents = packed
    return Draft(
        tokens, tuple(None if row is None else torch.from_numpy(row) for row in rows), parents
    )


class GuidanceAbandoned(Exception):
    """Another request came while guidance was awaited: the target's prefill has failed."""


class Mailbox:
    """Requests in order; the drafter can read further ones while it works on a request."""

    def __init__(self, pipe: Connection, drafter: Any) -> None:
        self._pipe = pipe
        self._drafter = drafter
        self._pending: PipeMessage | None = None
        #: Seconds of the current request spent waiting for the target.
        self.waited = 0.0

    def next(self) -> PipeMessage:
        """Return the next request; raises EOFError when the other end is closed."""
        request: PipeMessage = self._pending or self._pipe.recv()
        self._pending = None
        self.waited = 0.0
        return request

    def listen(self) -> None:
        """Wait for guidance and pass it to the drafter.

        Raises:
            GuidanceAbandoned: another request came.
        """
        start = time.perf_counter()
        verb, number, arguments = self._pipe.recv()
        self.waited += time.perf_counter() - start
        if verb != "guide":
            self._pending = (verb, number, arguments)
            raise GuidanceAbandoned
        self.hand_over(arguments)

    def hand_over(self, arguments: tuple[Any, ...]) -> None:
        """Pass the target's choice to the drafter."""
        self._drafter.guide(Guidance(torch.from_numpy(arguments[0]), arguments[1]))


def serve(
    pipe: Connection,
    _files: ImportedFiles,
    factory: Callable[[], Drafter],
    cores: Collection[int] | None,
) -> None:
    """Answer requests until the other end closes the pipe.

    Receiving `_files` imports the users' files, which may hold classes of the factory.

    The first message lists the devices on which the drafter works, empty if unknown. An answer is (number, result or
    UserError, its `Lap`). Any other error ends the process, which the other end notices. Ctrl-C, which reaches both
    ends, is handled by the other one.
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
            verb, number, arguments = mailbox.next()
        except EOFError:
            return
        try:
            answer, lap = meter.run(partial(_answer, mailbox, drafter, verb, arguments))
        except GuidanceAbandoned:
            continue
        if number:
            # Processor time of a thread excludes waiting for the target already, time between events does not.
            waited = mailbox.waited if meter.devices else 0.0
            lap = Lap(lap.wall - mailbox.waited, max(lap.busy - waited, 0.0))
            try:
                pipe.send((number, answer, lap))
            except BrokenPipeError:
                return  # the other end is closed


def _answer(
    mailbox: Mailbox, drafter: Any, verb: str, arguments: tuple[Any, ...]
) -> Packed | UserError | None:
    """Carry out a request: a method of the drafter, or guidance."""
    try:
        if verb == "guide":
            mailbox.hand_over(arguments)
            return None
        draft: Draft | None = getattr(drafter, verb)(*arguments)
    except (UserError, MethodError) as error:
        return UserError(str(error))
    return None if draft is None else pack(draft)


#: Builds a drafter inside its process; it is pickled by name.
Factory = Callable[[], Drafter]

#: Seconds that a process gets to end by itself before it is killed.
GRACE = 2.0


class ProcessTransport(SequentialTransport):
    """A transport with the drafter in another process, and that drafter; the verifier stays in this one.

    Use it as a context manager, and give it to the machine as both. The answer so far crosses the pipe as ids, drafted
    tokens come back, and for a sampling draft also the rows it drew from.

    Args:
        factory: builds the drafter, in its own process.
        patience: seconds to wait for a draft; `READING` times as long for a draft that begins with a prompt and for
            reading a chat. A process that dies is noticed at once.
        cores: core numbers for this process and for the drafter's; None keeps both unchanged.
        target: times the verifier.
        start: seconds to wait for the factory.

    Raises:
        DrafterLost: the process died or did not answer in time, on start and at any later call.
        UserError: the drafter refused a request; it lives on.
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
        self._former_cores: Collection[int] | None = None
        self._last_number = 0
        self._unread = False
        self._allowed = patience
        super().__init__(target)
        #: Devices on which the drafter works.
        self.devices: tuple[torch.device, ...] = ()
        #: Why the drafter was lost; None while it is alive.
        self.lost: str | None = None

    def __enter__(self) -> ProcessTransport:
        """Start the process and wait until its drafter is built.

        Raises:
            UserError: the user's script has no guard, or the drafter cannot be built.
        """
        check_script()
        context = get_context("spawn")
        self._pipe: Connection
        self._pipe, child_end = context.Pipe()
        child_cores = None if self._cores is None else self._cores[1]
        self._process = context.Process(
            target=serve,
            args=(child_end, ImportedFiles.of_process(), self._factory, child_cores),
            daemon=True,
        )
        self._process.start()
        child_end.close()  # else the pipe would stay open after the process ended
        try:
            built = self._receive(self._start)
            if isinstance(built, UserError):
                raise built
            self.devices = tuple(torch.device(name) for name in built)
        except (DrafterLost, UserError, KeyboardInterrupt):
            self.close()
            raise
        if self._cores is not None:
            self._former_cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cores[0])
        return self

    def __exit__(self, *error: object) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process: by closing the pipe, then by force."""
        if self._former_cores is not None:
            os.sched_setaffinity(0, self._former_cores)
            self._former_cores = None
        self._pipe.close()
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    # ------------------------------------------------------------------ as a drafter

    def begin(self, order: Any) -> None:
        """Prepare for an answer, and wait until that is done."""
        self._request("begin", order)
        self._answer()

    def start(self) -> None:
        """Run the prompt, and wait until that is done."""
        self._request("start")
        self._answer()

    def guide(self, guidance: Guidance) -> None:
        """Pass on the target's choice; it has no answer."""
        self._send(("guide", 0, (guidance.kept.cpu().numpy(), guidance.n_tokens)))

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        """Request a draft without waiting for it; the rounds collect it."""
        self._request("draft", list(tokens), count)
        return EMPTY_DRAFT

    def begin_draft(self, draft: Callable[[], Draft]) -> Pending:
        """Send the request."""
        draft()
        return self._drafted

    # ------------------------------------------------------------------ messages

    def _request(self, verb: str, *arguments: Any) -> None:
        """Send a request without waiting for its answer."""
        self._last_number += 1
        self._unread = self._unread or verb == "begin"
        self._allowed = self._patience * (READING if self._unread else 1)
        if verb in ("start", "draft"):
            self._unread = False
        self._send((verb, self._last_number, arguments))

    def _answer(self) -> tuple[Packed | None, Lap]:
        """Return the result of the last request, and its seconds in the process, without waiting for guidance."""
        while True:
            number, result, lap = self._receive(self._allowed)
            if number != self._last_number:
                continue  # the caller of that request has failed meanwhile
            if isinstance(result, UserError):
                raise result
            return result, lap

    def _drafted(self) -> tuple[Draft, Lap]:
        packed, lap = self._answer()
        assert packed is not None  # the request was a draft
        return unpack(packed), lap

    def _send(self, request: PipeMessage) -> None:
        try:
            self._pipe.send(request)
        except OSError as error:
            raise self._lost_error(self._exit_reason()) from error

    def _receive(self, patience: float) -> Any:
        try:
            if not self._pipe.poll(patience):
                self._process.kill()
                raise self._lost_error(f"the drafter did not answer within {patience:g} s")
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost_error(self._exit_reason()) from error

    def _lost_error(self, reason: str) -> DrafterLost:
        self.lost = reason
        return DrafterLost(reason)

    def _exit_reason(self) -> str:
        self._process.join(GRACE)
        code = self._process.exitcode
        cause = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        return f"the drafter's process ended by {cause}"
