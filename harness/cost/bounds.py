"""Bounds: the speed-up that FLOPs allow, and the time in which a decoding step reads weights and cache once.

A phase that spends a share s of the full FLOPs can be at most 1/s times as fast, if both run at the same rate. If the
whole interval of a measured speed-up lies above the bound, the timer leaves something out, the unreduced side does work
that is not counted, or the two do not run at the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.harness.cost.clock import Clock
from espalier.harness.cost.flops import SampleFlops
from espalier.harness.stats import ratio_interval


@dataclass(frozen=True)
class Gain:
    """Speed-up of a phase over the unreduced model; factors, larger is faster.

    Attributes:
        ratio: the unreduced model's time over the method's, geometric mean over the pairs.
        low: lower end of the 95 % interval, Student's on the logarithms of the pairs; None with a single pair.
        high: upper end.
        bound: limit by the FLOPs of the same phase of the same samples; None if these are not counted.
    """

    ratio: float
    low: float | None
    high: float | None
    bound: float | None = None

    @classmethod
    def of_pairs(
        cls, plain: Sequence[float], reduced: Sequence[float], bound: float | None = None
    ) -> Gain:
        """Return the gain from the times of both sides, pair by pair."""
        interval = ratio_interval(plain, reduced)
        if math.isnan(interval.low):
            return cls(interval.value, None, None, bound)
        return cls(interval.value, interval.low, interval.high, bound)

    @property
    def above_bound(self) -> bool:
        """Whether the whole interval lies above the bound, so that the timing needs an explanation."""
        return self.bound is not None and self.low is not None and self.low > self.bound

    def entry(self) -> dict[str, Any]:
        """Return the form stored in a row."""
        ends = {"ratio": self.ratio, "low": self.low, "high": self.high}
        if self.bound is None:
            return ends
        return {**ends, "bound": self.bound, "above_bound": self.above_bound}


def prefill_bound(samples: Sequence[SampleFlops]) -> float:
    """Return full over spent FLOPs of the decoder layers, all that the prefill phase times.

    The output head is not included: it runs after the phase, once for each prompt on both sides.
    """
    full = sum(sample.exact_full.text for sample in samples)
    return full / sum(sample.exact.text for sample in samples)


def first_token_bound(samples: Sequence[SampleFlops]) -> float:
    """Return the same with tower and projector on both sides."""
    full = sum(sample.exact_full.total - sample.exact_full.head for sample in samples)
    return full / sum(sample.exact.total - sample.exact.head for sample in samples)


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
    decoder = stored_tensors(adapter.decoder)
    weights = {id(weight): weight for weight in decoder if id(weight) not in table}
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
