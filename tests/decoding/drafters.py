"""Drafters that a separate process builds by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.decoding.speculative.drafts import Draft

STEP = 0.03

#: Seconds after which a side no longer waits for the other.
MEETING = 60.0


def work(seconds: float) -> None:
    """Use a processor for so long, however long that takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def meet(folder: Path, side: str, other: str) -> bool:
    """Return whether the other side is at work, too: each leaves a file and waits for the other's."""
    (folder / side).touch()
    end = time.monotonic() + MEETING
    while not (folder / other).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def following(tokens: Sequence[int]) -> int:
    """The language that the tests decode: hardly any repetition, known to both sides."""
    return (sum(tokens[-3:]) * 7 + len(tokens) * 3) % 101


class Guesser:
    """Right but for every fifth place; may be slow, may die, may hang."""

    def __init__(
        self,
        step: float = 0.0,
        die_at: int | None = None,
        hang_at: int | None = None,
        reads: float = 0.0,
    ):
        self._step, self._die_at, self._hang_at, self._reads = step, die_at, hang_at, reads

    def begin(self, order: float) -> None:
        """Read for so many seconds, and as long again before the first draft."""
        time.sleep(order)
        self._reads = order

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        if self._die_at is not None and len(tokens) >= self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._hang_at is not None and len(tokens) >= self._hang_at:
            time.sleep(60)
        if self._reads:
            time.sleep(self._reads)
            self._reads = 0.0
        ids = list(tokens)
        for _ in range(count):
            work(self._step)
            ids.append(following(ids) + (len(ids) % 5 == 4))
        return Draft(tuple(ids[len(tokens) :]))


def quick() -> Guesser:
    return Guesser()


def slow() -> Guesser:
    return Guesser(STEP)


def dying() -> Guesser:
    return Guesser(die_at=9)


def hanging() -> Guesser:
    return Guesser(hang_at=9)


class Meeting(Guesser):
    """Its second draft waits until the target verifies."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._drafts = folder, 0

    def draft(self, tokens: Sequence[int], count: int) -> Draft:
        self._drafts += 1
        if self._drafts == 2:
            meet(self._folder, "drafting", "verifying")
        return super().draft(tokens, count)


def broken() -> Guesser:
    raise RuntimeError("no drafter today")
