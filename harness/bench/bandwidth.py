"""What decoding cannot beat: a step of one token reads every weight of the decoder and the whole cache once."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles

import torch

from harness.bench.setup import Figure
from harness.decoding.meter import Meter
from harness.engine.parts import Parts

#: Copies that are timed as one, so that launching them does not count.
COPIES = 8


def copy_rate(device: torch.device, n_bytes: int, repeats: int = 7) -> float:
    """Return the bytes a second that copies within a device's memory move, read and written both counted; a median."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    meter = Meter.of([device])
    seconds = [meter.run(copies)[1].wall for _ in range(repeats + 1)][1:]
    return 2 * n_bytes * COPIES / median(seconds)


def step_bytes(adapter: Parts) -> int:
    """Return the bytes of weights that a step of one token reads.

    These are the decoder's and the output head's. Of a table of embeddings a step reads one row, unless the head is the
    same table. All experts of a mixture count, although a token is sent to few.
    """
    table = {id(one) for one in adapter.model.get_input_embeddings().parameters()}
    head = adapter.model.get_output_embeddings().parameters()
    read = {id(one): one for one in adapter.decoder.parameters() if id(one) not in table}
    read |= {id(one): one for one in head}
    return sum(one.numel() * one.element_size() for one in read.values())


def against_bandwidth(
    part: str, name: str, ms: Sequence[float], n_bytes: int, rate: float
) -> list[Figure]:
    """Return the time of a step, the shortest in which its bytes can be read, and the percentage reached.

    Args:
        part: of the benchmark.
        name: of the step.
        ms: its times in milliseconds.
        n_bytes: weights and cache that it reads.
        rate: bytes a second, `copy_rate`.
    """
    least, found = 1e3 * n_bytes / rate, median(ms)
    low, _, high = quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else (found,) * 3
    gigabytes = f"{n_bytes / 1e9:.3g} GB of weights and cache"
    return [
        Figure(part, f"one token, {name}", found, "ms", (low, high)),
        Figure(part, f"least that bandwidth allows, {name}: {gigabytes}", least, "ms"),
        Figure(part, f"bandwidth reached, {name}", 100 * least / found, "%"),
    ]
