"""A recorder of steps without a GPU: torch's dispatcher does on the CPU what a CUDA graph does to values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations that depend on values for which the host must wait; they are errors while a GPU captures.
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._unique2.default,
}


class Tape(TorchDispatchMode):
    """Writes down operations with the very tensors they read and write, and every number as it was."""

    def __init__(self) -> None:
        super().__init__()
        self._played: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READS:
            raise RuntimeError(f"{func} reads from the device while a step is recorded")
        result = func(*args, **(kwargs or {}))
        self._played.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> None:
        """Run the operations again, each result written where the first one is; no Python of the step runs."""
        for func, args, kwargs, recorded in self._played:
            replayed = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(replayed), strict=True):
                if isinstance(old, Tensor) and not _same_memory(old, new):
                    old.copy_(new)


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


class Tapes:
    """Stands in for `CudaGraphs`."""

    def __init__(self) -> None:
        #: Keys that the recorded steps attend to, in the order of recording.
        self.recorded: list[int] = []
        self.replays = 0

    def capture(self, function: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Run the function as a GPU would have it warm up, and write it down."""
        function(*inputs)
        with Tape() as tape:
            result = function(*inputs)
        (keys,) = function.args
        self.recorded.append(keys)
        result.fill_(float("nan"))  # a capture computes nothing

        def replay() -> Tensor:
            self.replays += 1
            tape.play()
            return result

        return replay
