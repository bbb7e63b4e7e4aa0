"""Read, decode and preprocess the next batches in a thread while the model answers the current one.

It is a thread because Pillow, PyAV and torch release Python's lock while they work, and because a benchmark's functions
and open files cannot be handed to another process (docs/scale.md has the measurements). There is a single one, so that
samples are read in the run's order.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue
from typing import TypeVar

from espalier.harness.ranks import processors
from espalier.harness.specs.run_spec import RunSpec

Item = TypeVar("Item")
Made = TypeVar("Made")

#: Batches that `engine.prefetch=auto` reads ahead, if any: one ready, one in preparation.
AHEAD = 2

#: Cores that a process then needs: one for each model (one or two), and one for reading.
CORES, CORES_OF_TWO = 2, 3

#: Seconds that the reader gets to finish its current item.
LEAVE = 2.0


@dataclass(frozen=True)
class ReadingTimes:
    """Seconds that reading and preprocessing of `samples` took, and that answers waited for them."""

    samples: int = 0
    took: float = 0.0
    waited: float = 0.0

    def __add__(self, addend: ReadingTimes) -> ReadingTimes:
        """Return the sum."""
        return ReadingTimes(
            self.samples + addend.samples, self.took + addend.took, self.waited + addend.waited
        )

    @property
    def ms(self) -> dict[str, float] | None:
        """Milliseconds per sample; None without samples."""
        if not self.samples:
            return None
        return {name: 1e3 * getattr(self, name) / self.samples for name in ("took", "waited")}


class ReaderStopped(BaseException):
    """Ends the reader at the next sample, when its batches are not needed any more."""


@contextmanager
def read_ahead(
    items: Sequence[Item],
    ahead: int,
    preparer: Callable[[], Callable[[Item, Callable[[], None]], Made]],
) -> Iterator[Callable[[], Made | None]]:
    """Yield a function that waits for the next item, prepared in a thread, and returns it or raises its error.

    Without `ahead` the function returns None.

    Args:
        items: items to prepare, in order.
        ahead: largest number of items in preparation or ready, and not taken.
        preparer: returns what prepares an item; it gets a function to call between samples, which raises when the
            reader has to stop.

    Cost: at the end of the block at most LEAVE seconds.
    """
    if not ahead or len(items) < 2:
        yield lambda: None
        return
    make, room, stopped = preparer(), threading.Semaphore(ahead), threading.Event()
    prepared: Queue[Future[Made]] = Queue()

    def check() -> None:
        if stopped.is_set():
            raise ReaderStopped

    def work() -> None:
        for item in items:
            room.acquire()
            future = Future[Made]()
            try:
                check()
                future.set_result(make(item, check))
            except ReaderStopped:
                return
            except BaseException as error:  # raised again by `take`
                future.set_exception(error)
            prepared.put(future)
            del future  # only the queue refers to it, so that it is freed as soon as it is answered

    def take() -> Made:
        future = prepared.get()
        room.release()
        return future.result()

    # A daemon, so that the command can end even if the thread hangs.
    thread = threading.Thread(target=work, name="feeder", daemon=True)
    thread.start()
    with kept_memory():
        try:
            yield take
        finally:
            stopped.set()
            room.release()
            thread.join(LEAVE)


def batches_ahead(spec: RunSpec, processes: int = 1) -> int:
    """Return how many batches a run reads ahead; 0: they are read between answers.

    `engine.prefetch=auto` reads ahead only for a model on an accelerator: another model computes on the cores that
    would read. Prompts that are timed are never read ahead.

    Args:
        spec: the run.
        processes: number of the run's processes on this machine, which share its cores.
    """
    if spec.benchmark.prompt_tokens is not None:
        return 0
    if spec.engine.prefetch != "auto":
        return spec.engine.prefetch
    needed = CORES if spec.method.draft is None else CORES_OF_TWO
    cores = processors() // processes
    return AHEAD if spec.model.device != "cpu" and cores >= needed else 0


#: `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of malloc.h.
TRIM, MMAP = -1, -3

#: Bytes above which the free end of the heap is returned, and above which a block is mapped by itself.
KEPT = {TRIM: 2**31 - 1, MMAP: 2**30}

#: The values that glibc reaches by itself in a process that has freed large blocks.
USUAL = {TRIM: 2**26, MMAP: 2**25}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the process, and return it to the system at the end of the block.

    A picture of 12 megapixels is a block of 36 MB. glibc requests each such block from the system and returns it when
    it is freed, so that every picture costs page faults; a block that is kept serves the next picture (docs/scale.md).

    The kept memory settles at a few times the memory in use. Nothing changes without glibc, or if the environment
    configures allocation (`MALLOC_*`, `GLIBC_TUNABLES`).
    """
    library = ctypes.CDLL(None)
    configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if configured or not hasattr(library, "mallopt"):
        yield
        return
    for option, size in KEPT.items():
        library.mallopt(option, size)
    try:
        yield
    finally:
        for option, size in USUAL.items():
            library.mallopt(option, size)
        library.malloc_trim(0)
