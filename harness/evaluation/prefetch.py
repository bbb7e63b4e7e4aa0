"""The next batches are read, decoded and preprocessed in a thread while the model answers the last one.

A thread, because Pillow, PyAV and torch let go of Python's lock where they work, and because neither a benchmark's
functions nor what they read from could be handed to another process (docs/scale.md has the measurements). One alone:
samples are read in the run's order, as without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, Queue
from types import TracebackType
from typing import Generic, TypeVar

from espalier.harness.errors import tell_once
from espalier.harness.evaluation.allocator import kept_memory
from espalier.harness.specs.run_spec import RunSpec

Item = TypeVar("Item")
Made = TypeVar("Made")

#: Batches ahead where `engine.prefetch=auto` reads ahead at all: one ready, one in the making.
AHEAD = 2

#: Cores that a process then needs: one for the model and one for the reading; of two models one each.
CORES, CORES_OF_TWO = 2, 3

#: Seconds that the reader has to leave what it is in the middle of.
LEAVE = 2.0

#: Seconds after which a reader that has shown nothing is looked after.
LOOK = 1.0


@dataclass(frozen=True)
class Reading:
    """Seconds of `samples`: those that reading and preprocessing took, and those that answers waited for it."""

    samples: int = 0
    took: float = 0.0
    waited: float = 0.0

    def __add__(self, other: Reading) -> Reading:
        """Return both together."""
        return Reading(
            self.samples + other.samples, self.took + other.took, self.waited + other.waited
        )

    @property
    def ms(self) -> dict[str, float] | None:
        """Milliseconds of a sample; None if there was none."""
        if not self.samples:
            return None
        return {name: 1e3 * getattr(self, name) / self.samples for name in ("took", "waited")}


class Left(BaseException):
    """Ends the reader at the next sample, once nobody waits for it any more."""


@dataclass(frozen=True)
class _Outcome(Generic[Made]):
    """What came of one item: a value, or what was raised."""

    value: Made | None = None
    error: BaseException | None = None


class Feeder(Generic[Item, Made]):
    """Makes something of each item in a thread, in their order, a bounded number ahead of whoever takes it.

    Args:
        make: makes one; it is handed a function to call between samples, which raises once the reader is to stop.
        items: what of.
        ahead: how many may be made, or in the making, and not taken yet.
    """

    def __init__(
        self, make: Callable[[Item, Callable[[], None]], Made], items: Sequence[Item], ahead: int
    ) -> None:
        self._make = make
        self._items = items
        self._room = threading.Semaphore(ahead)
        self._made: Queue[_Outcome[Made]] = Queue()
        self._stopped = threading.Event()
        self._reason = "it ended early"
        # Whatever it hangs in, the command can end.
        self._thread = threading.Thread(target=self._work, name="feeder", daemon=True)

    def __enter__(self) -> Feeder[Item, Made]:
        """Start reading."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system's limit of threads
            self._reason = str(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop reading at the next sample, and let go of what nobody took. Cost: at most LEAVE seconds."""
        self._stopped.set()
        self._room.release()
        if self._thread.is_alive():
            self._thread.join(LEAVE)

    def take(self) -> Made | None:
        """Return what was made of the next item, waiting for it; None, and a line on stderr, if the reader is gone.

        Raises:
            BaseException: what making it raised.
        """
        while True:
            try:
                outcome = self._made.get(timeout=LOOK)
                break
            except Empty:
                if self._thread.is_alive() or not self._made.empty():
                    continue
            tell_once(
                f"engine.prefetch: the thread that reads ahead is gone ({self._reason}); "
                "batches are read in turn with their answers"
            )
            return None
        self._room.release()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _work(self) -> None:
        for item in self._items:
            self._room.acquire()
            try:
                self._check()
                # Held by nobody but the queue: what is taken is freed as soon as it is answered.
                self._made.put(_Outcome(self._make(item, self._check)))
            except Left:
                return
            except BaseException as error:  # whatever reading may raise belongs to whoever takes it
                self._made.put(_Outcome(error=error))

    def _check(self) -> None:
        if self._stopped.is_set():
            raise Left


@contextmanager
def fed(
    items: Sequence[Item],
    ahead: int,
    preparer: Callable[[], Callable[[Item, Callable[[], None]], Made]],
) -> Iterator[Callable[[], Made | None]]:
    """Yield what returns one item after another as a thread makes it of them; without `ahead`, what returns nothing."""
    if not ahead or len(items) < 2:
        yield lambda: None
        return
    with kept_memory(), Feeder(preparer(), items, ahead) as feeder:
        yield feeder.take


def look_ahead(spec: RunSpec, processes: int = 1) -> int:
    """Return how many batches a run reads ahead; 0 is in turn with the answers.

    With `engine.prefetch=auto` only a model on an accelerator is read ahead for: elsewhere it computes on the cores
    that would read. Prompts that are there to be timed are never read ahead.

    Args:
        spec: the run.
        processes: of the run on this machine, which share its cores.
    """
    if spec.benchmark.prompt_tokens is not None:
        return 0
    if spec.engine.prefetch != "auto":
        return spec.engine.prefetch
    needed = CORES if spec.method.draft is None else CORES_OF_TWO
    own = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = len(own) // processes
    return AHEAD if spec.model.device != "cpu" and cores >= needed else 0
