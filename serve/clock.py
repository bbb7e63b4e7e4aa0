"""Seconds that a method takes inside an engine: for its metrics, and for a program that drives its workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from espalier.serve.adapter import let_cpu_runner_ask

#: A moment: seconds of the host, or an event on the device.
Moment = Any


class Stopwatch:
    """Times what the plug-in adds to each batch of pictures; on a GPU by events, for which the host does not wait.

    Args:
        observe: takes the seconds of each batch, once they are known; None: nobody does.
    """

    def __init__(self, observe: Callable[[float], None] | None = None) -> None:
        self._observe = observe
        self._now: Callable[[], Moment] = _event if torch.cuda.is_available() else perf_counter
        self._laps: list[tuple[Moment, Moment]] = []
        self._batches: deque[list[tuple[Moment, Moment]]] = deque()
        self._total = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside the block for the batch."""
        start = self._now()
        try:
            yield
        finally:
            self._laps.append((start, self._now()))

    def end_batch(self) -> None:
        """Close a batch, and read the batches that the device has finished."""
        if self._laps:
            self._batches.append(self._laps)
            self._laps = []
        while self._batches and _is_over(self._batches[0][-1][1]):
            self._read(self._batches.popleft())

    def take(self) -> float:
        """Return the seconds of all batches since the last call; on a GPU, wait for it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.end_batch()
        seconds, self._total = self._total, 0.0
        return seconds

    def _read(self, laps: list[tuple[Moment, Moment]]) -> None:
        seconds = sum(_between(start, end) for start, end in laps)
        self._total += seconds
        if self._observe is not None:
            self._observe(seconds)


class TimedModel:
    """Mixin over a model of vLLM: its encoder, with what a method adds to it, is timed."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.encoder_watch = Stopwatch()
        let_cpu_runner_ask()

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode the items of a batch."""
        with self.encoder_watch.running():
            encoded = super().embed_multimodal(**kwargs)  # type: ignore[misc]
        self.encoder_watch.end_batch()
        return encoded


class WorkerClock:
    """Extension of vLLM's workers (`worker_extension_cls`)."""

    def encoder_seconds(self) -> tuple[float, float | None]:
        """Return the seconds of the encoder since the last call, and of them the plug-in's; None: vLLM prunes."""
        model = self.get_model()  # type: ignore[attr-defined]
        watch: Stopwatch | None = getattr(model, "stopwatch", None)
        return model.encoder_watch.take(), None if watch is None else watch.take()


def _event() -> Moment:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _is_over(moment: Moment) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def _between(start: Moment, end: Moment) -> float:
    return float(end - start if isinstance(end, float) else start.elapsed_time(end) / 1000)
