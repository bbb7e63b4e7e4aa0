"""CUDA graphs: the kernels of a step, recorded once and launched together, and where that can be done.

A step of a small model is hundreds of kernels of a few microseconds each, and launching them from Python can take
longer than running them. A graph is launched as a whole. What it holds is addresses and numbers: a step may read
nothing from the device, and whatever changes between two steps must be in a tensor that stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.harness.engine.model_parts import Parts
from espalier.harness.errors import Refused
from espalier.harness.specs.run_spec import Auto, ModelSpec

#: Runs before a recording: libraries choose their kernels and take their workspaces in the first ones.
WARMING = 3

Step = Callable[..., Tensor]


class Graphs(Protocol):
    """Records functions of tensors."""

    def capture(self, function: Step, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Return what runs `function` again on what `inputs` hold by then, and returns its result.

        The result is one tensor, which every further run writes over. The function may run several times meanwhile, so
        running it twice must come to the same as once.
        """


class CudaGraphs:
    """Records on one GPU, in a stream of its own; one object for all answers of a model.

    Capturing in `thread_local` mode and waiting for nothing but streams of this thread, it leaves another thread free
    to run the other side meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        # One stream for all recordings: a library keeps a workspace of many MB for each stream that it has seen. And
        # one pool, or every answer would leave its intermediate results reserved: they are never needed at one time.
        self._stream: Any = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._latest: Any = None

    def capture(self, function: Step, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Record. Cost: `WARMING` + 1 launches of the function, and the memory of its intermediate results."""
        current = torch.cuda.current_stream(self._stream.device)
        graph: Any = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        # Not torch.cuda.graph: it waits for the whole device, which another thread may be capturing on.
        with torch.cuda.stream(self._stream):
            for _ in range(WARMING):
                function(*inputs)
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = function(*inputs)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        self._latest = graph  # a pool is gone with the last graph that has been recorded into it

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def graphs_for(adapter: Parts, asked: bool | Auto) -> Graphs | None:
    """Return what records steps of a loaded model; None where nothing does.

    Args:
        adapter: the model.
        asked: `engine.graphs`; `auto`: where it can be done.

    Raises:
        Refused: it is asked for and cannot be done.
    """
    if asked is False:
        return None
    why = obstacle(adapter.spec) or _obstacle_inside(adapter)
    if why is None:
        return CudaGraphs(adapter.device)
    if asked is True:
        raise refused(why)
    return None


def obstacle(model: ModelSpec) -> str | None:
    """Return why steps of a model cannot be recorded, as far as its settings tell; None: nothing speaks against it."""
    if torch.device(model.device).type != "cuda":
        return f"model.device={model.device!r} is no GPU"
    if model.device_map is not None and torch.cuda.device_count() > 1:
        return f"model.device_map={model.device_map!r} spreads the model over several GPUs"
    if model.attention != "sdpa":
        return f"model.attention={model.attention!r} is not sdpa, which attends to a part of its keys by a mask"
    if model.facts.text.experts:
        return f"model={model.name!r} chooses among experts, and the host reads which"
    return None


def _obstacle_inside(adapter: Parts) -> str | None:
    """Return what only a loaded model tells."""
    name = adapter.spec.name
    if len({parameter.device for parameter in adapter.model.parameters()}) > 1:
        return f"model={name!r} has come to lie on several devices"
    if getattr(getattr(adapter.decoder, "rotary_emb", None), "rope_type", None) == "dynamic":
        return (
            f"model={name!r} changes its rotary frequencies with the length, which the host reads"
        )
    return None


def refused(why: str) -> Refused:
    """Return the error of `engine.graphs=true`."""
    return Refused(f"engine.graphs=true records steps on one GPU, and {why}; valid: false, auto")
