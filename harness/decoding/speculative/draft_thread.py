"""Both sides in one process, the drafter in a thread of its own; on a GPU each side has a stream."""

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
from espalier.harness.decoding.speculative.state_machine import READING, DrafterLost, Timed
from espalier.harness.decoding.speculative.transports import Sequential, alone

Found = TypeVar("Found")


class Threads:
    """A transport for two models on one GPU, or on two, without a second process.

    Python runs one thread at a time, so kernels overlap only as far as they are launched ahead of their execution: on
    one GPU, where a step is bound by memory traffic, the gain ends where both sides together reach its bandwidth. On
    the CPU it is of use for tests alone.

    Args:
        target: the target's devices, the one that inputs go to first.
        draft: the drafter's.
        patience: seconds to wait for a draft after the target has finished.
        reading: says whether the drafter's next draft begins with its prompt, for which it has `READING` times as long.

    Raises:
        DrafterLost: a draft did not come in time. Its thread cannot be stopped; no more drafts are asked of it.
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

    def __enter__(self) -> Threads:
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

    def in_turn(self, draft: Callable[[], Draft], rows: Callable[[Draft], Sequence[Row]]) -> Timed:
        """Draft, then verify, both in this thread."""
        return Sequential(self._target.meter, self._draft.meter).in_turn(draft, rows)

    def at_once(self, draft: Callable[[], Draft], rows: Callable[[], Sequence[Row]]) -> Timed:
        """Draft in the drafter's thread while verifying in this one."""
        if self._lost:
            raise DrafterLost("the drafter's thread hangs")
        patience = self._patience * (READING if self._reading() else 1)
        start = time.perf_counter()
        future = self._pool.submit(self._draft.run, draft)
        found, verifying = self._target.run(rows)
        try:
            proposed, drafting = future.result(timeout=patience)
        except Late as error:
            self._lost = True
            reason = f"the drafter did not answer within {patience:g} s"
            raise DrafterLost(reason) from error
        return Timed(proposed, found, time.perf_counter() - start, drafting, verifying)

    def alone(self, rows: Callable[[], Sequence[Row]]) -> Timed:
        """Verify."""
        return alone(rows, self._target.meter)


class Lane:
    """Where one side works: a stream of its own on its first GPU, just the calling thread elsewhere."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        on_gpu = devices[0].type == "cuda"
        self._stream: Any = torch.cuda.Stream(devices[0]) if on_gpu else None
        #: Times what goes on in the calling thread's streams.
        self.meter = Meter.of(devices)

    def run(self, work: Callable[[], Found]) -> tuple[Found, Lap]:
        """Do the work and return its result and its times, which end when the stream has finished."""
        with self._entered():
            return self.meter.run(work)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        # What the other thread did before, such as loading weights, is on another stream.
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
