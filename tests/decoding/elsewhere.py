"""Tensors on a simulated second device: they compute, and refuse to meet any other tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Elsewhere(Tensor):
    """Pretends to be on another device until `to` names a real one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.cpu):
            where = [
                argument
                for argument in (*args[1:], *kwargs.values())
                if isinstance(argument, torch.device | str)
            ]
            if where or func is Tensor.cpu:
                return args[0].as_subclass(Tensor).to(*args[1:], **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        joins = func in (torch.stack, torch.cat)
        # Numbers of the CPU may meet any tensor, but for those that join tensors.
        here = [
            leaf for leaf in leaves if not isinstance(leaf, Elsewhere) and (leaf.dim() or joins)
        ]
        if here and func is not Tensor.copy_:
            name = getattr(func, "__name__", func)
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def ending_elsewhere(model: Any) -> Iterator[None]:
    """Let a model's last module leaf its result on the second device, as one that is spread does."""

    def move(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output.as_subclass(Elsewhere)

    hook = model.get_output_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()
