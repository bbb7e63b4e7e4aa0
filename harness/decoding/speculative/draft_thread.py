"""Transport within one process: the drafter in its own thread; on a GPU each side has a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch

from espalier.harness.decoding.speculative.acceptance import Row
from espalier.harness.decoding.speculative.drafts import Draft
from espalier.harness.decoding.speculative.meter import Lap, Meter
from espalier.harness.decoding.speculative.state_machine import READING, DrafterLost, TimedRound
from espalier.harness.decoding.speculative.transports import SequentialTransport, verify_only

Result = TypeVar("Result")


class ThreadTransport:
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
        self._target = Lane(target)
        self._draft = Lane(draft)
        self._patience = patience
        self._reading = reading
        self._lost = False

    def __enter__(self) -> ThreadTransport:
        """Start the drafter's thread."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the thread, unless it hangs."""
        self._pool.shutdown(wait=not self._lost, cancel_futures=True)

    def in_turn(
        self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]
    ) -> TimedRound:
        """Draft, then verify, both in this thread."""
        return SequentialTransport(self._target.meter, self._draft.meter).in_turn(draft, rows)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Draft in the drafter's thread while verifying in this one."""
        if self._lost:
            raise DrafterLost("the drafter's thread hangs")
        patience = self._patience * (READING if self._reading() else 1)
        start = time.perf_counter()
        future = self._pool.submit(self._draft.run, draft)
        target_rows, verifying = self._target.run(rows)
        try:
            proposed, drafting = future.result(timeout=patience)
        except Late as error:
            self._lost = True
            reason = f"the drafter did not answer within {patience:g} s"
            raise DrafterLost(reason) from error
        return TimedRound(proposed, target_rows, time.perf_counter() - start, drafting, verifying)

    def verify_only(self, rows: Callable[[], Sequence[Row]]) -> TimedRound:
        """Verify."""
        return verify_only(rows, self._target.meter)


class Lane:
    """The place where one side works: a separate stream on its first GPU, or the calling thread elsewhere."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        on_gpu = devices[0].type == "cuda"
        self._stream: Any = torch.cuda.Stream(devices[0]) if on_gpu else None
        #: Meter of the calling thread's streams.
        self.meter = Meter.of(devices)

    def run(self, work: Callable[[], Result]) -> tuple[Result, Lap]:
        """Do the work and return its result and its times, which end when the stream has finished."""
        with self._entered():
            return self.meter.run(work)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        # Earlier work of the other thread, such as loading weights, is on another stream.
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
