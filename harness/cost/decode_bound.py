"""What decoding cannot beat: a step of one token reads every weight of the decoder and the whole cache once."""

from __future__ import annotations

from statistics import median
from typing import Any, Protocol

import torch

from espalier.harness.cost.clock import Clock

#: Copies that are timed as one, so that launching them does not count.
COPIES = 8


class Decoding(Protocol):
    """A model with a text stack, as an adapter describes it."""

    model: Any

    @property
    def decoder(self) -> Any:
        """The text stack, without the output head."""


def copy_rate(device: torch.device, n_bytes: int, repeats: int = 7) -> float:
    """Return the bytes a second that copies within a device's memory move, read and written both counted; a median."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        clock = Clock(device)
        with clock.phase("copies"):
            for _ in range(COPIES):
                target.copy_(source)
        seconds.append(clock.totals_ms()["copies"] / 1e3)
    return 2 * n_bytes * COPIES / median(seconds[1:])  # the first one touched the pages


def step_bytes(adapter: Decoding) -> int:
    """Return the bytes of weights that a step of one token reads.

    These are the decoder's and the output head's. Of a table of embeddings a step reads one row, unless the head is the
    same table. All experts of a mixture count, although a token is sent to few.
    """
    table = {id(one) for one in adapter.model.get_input_embeddings().parameters()}
    head = adapter.model.get_output_embeddings().parameters()
    read = {id(one): one for one in adapter.decoder.parameters() if id(one) not in table}
    read |= {id(one): one for one in head}
    return sum(one.numel() * one.element_size() for one in read.values())
