"""Seconds that a method takes inside an engine, read from its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


class Stopwatch:
    """Adds up seconds; the device is synchronised at both ends, so it runs only where somebody reads it.

    Args:
        runs: whether it does anything.
    """

    def __init__(self, runs: bool) -> None:
        self._runs = runs
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside the block."""
        if not self._runs:
            yield
            return
        start = _now()
        try:
            yield
        finally:
            self.seconds += _now() - start


class WorkerClock:
    """Extension of vLLM's workers (`worker_extension_cls`)."""

    model_runner: Any

    def selection_seconds(self) -> float | None:
        """Return the seconds that the plug-in has taken since the last call; None where vLLM's own code prunes."""
        watch: Stopwatch | None = getattr(self.model_runner.get_model(), "stopwatch", None)
        if watch is None:
            return None
        seconds, watch.seconds = watch.seconds, 0.0
        return seconds


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter()
