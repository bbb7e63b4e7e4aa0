"""`engine.batch_size=auto`: the largest batch that fits in memory, found by trial."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from lmms_eval.api.instance import Instance

from espalier.harness.cost.memory import DeviceMemory, peak_memory
from espalier.harness.evaluation.batch_answers import Answerer, sample_names
from espalier.harness.specs.generation import Settings

log = logging.getLogger(__name__)

#: Sizes 1, 2, 4, ... up to this are tried; beyond it a step is bound by arithmetic, not by memory traffic.
LARGEST = 64

#: Share of the memory that a batch may use; the remainder is for longer samples and fragmentation.
SHARE = 0.9


class Trial(Protocol):
    """Runs a batch of a given size and returns its peak memory."""

    def base(self) -> int:
        """Return the bytes in use before any batch."""

    def room(self) -> int:
        """Return the bytes that the process may use in total."""

    def peak(self, size: int) -> int | None:
        """Run a batch of `size` samples and return the peak in bytes; None if it fails."""


def largest_batch(trial: Trial, cap: int) -> int:
    """Return the largest of 1, 2, 4, ... <= `cap` that fits; 1 if nothing does.

    A size is tried only if the line through the two previous peaks stays below `SHARE` of the room, so that no trial
    has to be killed. Cost: one batch of each size tried.
    """
    size, fitting, peaks = 1, 0, [trial.base()]
    while size <= max(cap, 1):
        peak = trial.peak(size)
        if peak is None:
            break
        peaks.append(peak)
        slope = max(peaks[-1] - peaks[-2], 0) / (size - fitting)
        fitting, size = size, 2 * size
        if peak + slope * fitting > SHARE * trial.room():
            break
    return max(fitting, 1)


class RealTrial:
    """Answers the requests with the longest prompts and discards the answers.

    Args:
        answerer: encodes and generates.
        requests: of one group, in any order; requests that cannot be encoded are skipped.
        group: their generation settings.
        device: the device that limits memory.
        share: number of processes on this machine, which divide its free memory.
    """

    def __init__(
        self,
        answerer: Answerer,
        requests: Iterable[Instance],
        group: Settings,
        device: str,
        share: int = 1,
    ) -> None:
        self._answerer = answerer
        self._group = group
        self._room = DeviceMemory(device, share)
        # The text needs no image to be loaded; the sort is stable, so ties keep the run's order.
        longest = sorted(requests, key=lambda request: -len(str(request.args[0])))
        self._candidates = self._sound(longest)
        self._batch: list[Instance] = []

    def base(self) -> int:
        """Return the bytes in use now."""
        return self._room.used()

    def room(self) -> int:
        """Return the bytes in use plus the free bytes."""
        return self._room.reachable()

    def peak(self, size: int) -> int | None:
        """Run the `size` longest requests; None if memory runs out or there are fewer."""
        self._batch += islice(self._candidates, size - len(self._batch))
        if len(self._batch) < size:
            return None
        try:
            with peak_memory(self._room.device) as peak:
                inputs, names = self._answerer.encode(self._batch), sample_names(self._batch)
                with self._answerer.seeded(self._batch, self._group):
                    self._answerer.generator.generate(inputs, names, **self._group.generate)
        except (Exception, SystemExit) as error:
            # The run meets the error again, where it is blamed on a sample.
            reason = "out of memory" if ran_out(error) else type(error).__name__
            log.info("batch of %d not possible: %s", size, reason)
            return None
        return peak.bytes

    def close(self) -> None:
        """Free the memory of the trials and reset the peak: the run reports its own."""
        self._batch.clear()
        self._room.tidy()
        with peak_memory(self._room.device):
            pass

    def _sound(self, requests: Iterable[Instance]) -> Iterator[Instance]:
        for request in requests:
            try:
                self._answerer.encode([request])
            except (Exception, SystemExit):
                # A bad sample does not count for memory; the run reports it.
                continue
            yield request


def ran_out(error: BaseException) -> bool:
    """Return whether an error means that a device, torch's CPU allocator or Python ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def longest_answers(
    groups: Iterable[tuple[Settings, list[Instance]]],
) -> tuple[Settings, list[Instance]]:
    """Return the group of requests that may generate the most tokens."""

    def tokens(group: tuple[Settings, list[Instance]]) -> int:
        # Denoised answers without a limit all have the model's length.
        return int(group[0].generate.get("max_new_tokens", 0))

    return max(groups, key=tokens)


def journalled_batch_size(entries: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the batch size that a journal holds."""
    sizes = (entry["batch_size"] for entry in entries if "batch_size" in entry)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)
