"""CUDA graphs: the kernels of a step, recorded once and launched together, where the model allows it.

A step of a small model is hundreds of kernels of a few microseconds each, and launching them from Python can take
longer than running them. A graph is launched as a whole. It stores addresses and numbers: a step may read nothing from
the device, and everything that changes between two steps must be in a tensor at a fixed address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.errors import Refused
from espalier.harness.specs.run_spec import Auto, ModelSpec

#: Runs before a recording: libraries choose their kernels and allocate their workspaces in the first ones.
WARMING = 3

Step = Callable[..., Tensor]


class Graphs(Protocol):
    """Records functions of tensors."""

    def capture(self, function: Step, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Return a function that runs `function` again on the current contents of `inputs`, and returns its result.

        The result is one tensor, overwritten by every further run. The function may run several times meanwhile, so
        running it twice must have the same effect as once.
        """


class CudaGraphs:
    """Records on one GPU, in a separate stream; one object for all answers of a model.

    It captures in `thread_local` mode and waits only for streams of this thread, so that another thread can run the
    other side meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        # One stream for all recordings: a library keeps a workspace of many MB for each stream. And one pool, or every
        # answer would keep its intermediate results reserved, although they are never needed at the same time.
        self._stream: Any = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._latest: Any = None

    def capture(self, function: Step, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Record the function. Cost: `WARMING` + 1 launches of it, and the memory of its intermediate results."""
        current = torch.cuda.current_stream(self._stream.device)
        graph: Any = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        # Not torch.cuda.graph: it synchronises the device, on which another thread may be capturing.
        with torch.cuda.stream(self._stream):
            for _ in range(WARMING):
                function(*inputs)
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = function(*inputs)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._latest = graph  # a pool is freed with the last graph recorded into it

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def graphs_for(adapter: ModelParts, requested: bool | Auto) -> Graphs | None:
    """Return the recorder of a loaded model's steps; None if steps are not recorded.

    Args:
        adapter: the model.
        requested: `engine.graphs`; `auto`: record where possible.

    Raises:
        Refused: requested and not possible.
    """
    if requested is False:
        return None
    reason = obstacle(adapter.spec) or _obstacle_inside(adapter)
    if reason is None:
        return CudaGraphs(adapter.device)
    if requested is True:
        raise graphs_error(reason)
    return None


def obstacle(model: ModelSpec) -> str | None:
    """Return why steps of a model cannot be recorded, according to its settings; None: no obstacle."""
    if torch.device(model.device).type != "cuda":
        return f"model.device={model.device!r} is not a GPU"
    if model.device_map is not None and torch.cuda.device_count() > 1:
        return f"model.device_map={model.device_map!r} spreads the model over several GPUs"
    if model.attention != "sdpa":
        return f"model.attention={model.attention!r} is not sdpa, which can attend to a part of its keys by a mask"
    if model.facts.text.experts:
        return f"model={model.name!r} routes to experts, and the host reads the choice"
    return None


def _obstacle_inside(adapter: ModelParts) -> str | None:
    """Return an obstacle that only a loaded model shows."""
    name = adapter.spec.name
    if len({parameter.device for parameter in adapter.model.parameters()}) > 1:
        return f"model={name!r} is spread over several devices"
    if getattr(getattr(adapter.decoder, "rotary_emb", None), "rope_type", None) == "dynamic":
        return (
            f"model={name!r} changes its rotary frequencies with the length, which the host reads"
        )
    return None


def graphs_error(reason: str) -> Refused:
    """Return the error of `engine.graphs=true`."""
    return Refused(f"engine.graphs=true records steps on one GPU, and {reason}; valid: false, auto")
