"""Signals of the tower: attention, keys and the projector's input, caught while vLLM encodes a batch of items.

Every tower of vLLM ends in `MMEncoderAttention`, with every kernel: queries and keys arrive there with norm and
rotary positions applied. A hook before it computes the one row, or the mean over queries, that methods read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from espalier.methods.base import Need
from espalier.serve.adapter import uncompiled
from espalier.serve.clock import Stopwatch
from espalier.serve.places import Tower

#: Queries that attend at a time, so that no whole map is held.
BLOCK = 256


class TowerSignals:
    """Values for each unit of the projector, over all items of a batch.

    Args:
        tower: of the model.
        needs: signals of the tower that some item's method reads.
        features: whether some method acts on the projector's input.
        stopwatch: counts the time of the hooks.
    """

    def __init__(
        self, tower: Tower, needs: Collection[Need], features: bool, stopwatch: Stopwatch
    ) -> None:
        self._tower = tower
        # In one order: processes that share a layer reduce a signal together.
        self._needs = sorted(needs, key=lambda need: need.key)
        self._features = features
        self._stopwatch = stopwatch
        self._parts: dict[str, list[Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Catch the values while the model encodes inside the block."""
        with ExitStack() as handles:
            handles.enter_context(uncompiled(self._tower.compiled))
            for layer in sorted({self._tower.number(need.layer) for need in self._needs}):
                hook, module = partial(self._attend, layer), self._tower.layers[layer]
                handles.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if self._features:
                enter = self._tower.entry.register_forward_pre_hook(self._enter)
                handles.callback(enter.remove)
            yield

    def __getitem__(self, key: str) -> Tensor:
        """Return the values (units, ...) of a need's key, or of `features`."""
        return torch.cat(self._parts[key])

    def _enter(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        del module
        self._parts.setdefault("features", []).append(self._tower.features(args[0]))

    def _attend(
        self, layer: int, module: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Any]
    ) -> None:
        names = ("query", "key", "value", "cu_seqlens")
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key = (
            inputs[name].reshape(*inputs[name].shape[:2], -1, module.head_size).transpose(1, 2)
            for name in names[:2]
        )
        borders = inputs.get("cu_seqlens")
        lengths = [query.shape[2]] if borders is None else borders.diff().tolist()
        parts = zip(query.split(lengths, 2), key.split(lengths, 2), strict=True)
        with self._stopwatch.running():
            for queries, keys in parts:
                for need in self._needs:
                    if self._tower.number(need.layer) == layer:
                        values = self._read(need.signal, queries, keys, module.scale)
                        self._parts.setdefault(need.key, []).append(self._tower.to_units(values))

    def _read(self, signal: str, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Return (images, patches, ...) of a signal from queries and keys (images, H, S, Dh)."""
        skip = self._tower.class_tokens
        if signal.startswith("wide"):
            query, key = (
                all_heads(states).transpose(1, 2).flatten(2).unsqueeze(1) for states in (query, key)
            )
            scale = query.shape[-1] ** -0.5
        if signal.endswith("keys"):
            return over_ranks(key[:, :, skip:].mean(1))
        asking = (query[:, :, :1] if skip else query).float()
        if signal == "cls_logits":
            logits = torch.einsum("bhd,bhsd->bs", asking.mean(2), key.float())
            return over_ranks(logits * (scale / query.shape[1]))[:, skip:]
        total = torch.zeros((), device=key.device)
        for rows in asking.split(BLOCK, dim=2):
            logits = rows @ key.float().transpose(2, 3) * scale
            total = total + logits.softmax(-1).mean(1).sum(1)
        return over_ranks(total / asking.shape[2])[:, skip:]


def ranks() -> int:
    """Return among how many processes the heads of a layer are divided."""
    from vllm.distributed import get_tensor_model_parallel_world_size

    return int(get_tensor_model_parallel_world_size())


def rank() -> int:
    """Return the number of this process among them."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def all_heads(states: Tensor) -> Tensor:
    """Return (images, H, S, Dh) of all processes: one wide head has the channels of every head."""
    if ranks() == 1:
        return states
    from vllm.distributed import tensor_model_parallel_all_gather

    gathered: Tensor = tensor_model_parallel_all_gather(states.contiguous(), dim=1)
    return gathered


def over_ranks(mean: Tensor) -> Tensor:
    """Return the mean over all heads; without it every process would choose other tokens."""
    if ranks() == 1:
        return mean
    from vllm.distributed import tensor_model_parallel_all_reduce

    summed: Tensor = tensor_model_parallel_all_reduce(mean.contiguous())
    return summed / ranks()
