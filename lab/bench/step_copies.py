"""What a decoding step writes: no operation of it may write as much as a layer of the cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Written(TorchDispatchMode):
    """Notes for each call of a decoder the largest tensor that one operation wrote, in bytes, and the operation.

    Counted are results in memory of their own, and tensors that are written in place; views cost nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        #: One entry for each call of the decoder: bytes and operation.
        self.steps: list[tuple[int, str]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note what it wrote."""
        results = func(*args, **(kwargs or {}))
        if self.steps:
            tensors = results if isinstance(results, tuple | list) else (results,)
            for tensor, stated in zip(tensors, func._schema.returns, strict=False):
                written = stated.alias_info is None or stated.alias_info.is_write
                if isinstance(tensor, Tensor) and written:
                    size = tensor.numel() * tensor.element_size()
                    self.steps[-1] = max(self.steps[-1], (size, str(func)))
        return results


@contextmanager
def written(decoder: nn.Module) -> Iterator[Written]:
    """Watch what the calls of a decoder stack write, from each one's begin to the next one's."""
    mode = Written()

    def begin(module: nn.Module, args: Any) -> None:
        mode.steps.append((0, ""))

    handle = decoder.register_forward_pre_hook(begin)
    try:
        with mode:
            yield mode
    finally:
        handle.remove()
