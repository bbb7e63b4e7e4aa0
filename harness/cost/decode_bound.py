"""Lower bound of decoding time: a step of one token reads every weight of the decoder and the whole cache once."""

from __future__ import annotations

from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.harness.cost.clock import Clock

#: Number of copies timed together, so that their launch time does not matter.
COPIES = 8


class TextModel(Protocol):
    """A model with a text stack, as an adapter describes it."""

    model: Any

    @property
    def decoder(self) -> Any:
        """The text stack, without the output head."""


def copy_rate(device: torch.device, n_bytes: int, repeats: int = 7) -> float:
    """Return the median rate of copies within a device's memory in bytes/s, counting both reads and writes."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        clock = Clock(device)
        with clock.phase("copies"):
            for _ in range(COPIES):
                target.copy_(source)
        seconds.append(clock.totals_ms()["copies"] / 1e3)
    return 2 * n_bytes * COPIES / median(seconds[1:])  # the first one maps the pages


def step_bytes(adapter: TextModel) -> int:
    """Return the bytes of weights that a step of one token reads.

    These are the decoder's and the output head's. A step reads only one row of the embedding table, unless the head is
    the same table. All experts of a mixture count, although a token is sent to few.
    """
    table = {id(weight) for weight in adapter.model.get_input_embeddings().parameters()}
    head = stored_tensors(adapter.model.get_output_embeddings())
    weights = {id(weight): weight for weight in stored_tensors(adapter.decoder)}
    weights = {key: weight for key, weight in weights.items() if key not in table}
    weights |= {id(weight): weight for weight in head}
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def stored_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors that hold a module's weights, each once, and of packed ones what they consist of.

    Packages keep packed weights in parameters, in buffers, or in attributes that only the state has.
    """
    state = module.state_dict(keep_vars=True).values()
    tensors = {id(tensor): tensor for tensor in state if isinstance(tensor, Tensor)}
    return [part for tensor in tensors.values() for part in _parts(tensor)]


def _parts(tensor: Any) -> list[Tensor]:
    """Return the tensors that one of a subclass consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, Tensor)]
