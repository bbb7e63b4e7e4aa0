"""Steps in which a layer runs only the places of an answer with the most changed values (dLLM-Cache, arXiv 2506.06295).

Of every place, a layer's values are computed and stored. Those of the lowest cosine with the values stored before run:
their keys are stored, and what the layer adds to their states. To the states of the others it adds what it added when
they last ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.hooks import RemovableHandle

from espalier.harness.engine.layout import take
from espalier.harness.engine.text.kv_cache import IndexedLayer


@dataclass(eq=False)
class LayerChanges:
    """What each layer added to the states of an answer's places.

    Attributes:
        of_layer: (B, G, D), first layer to last; empty until recorded.
    """

    of_layer: list[Tensor] = field(default_factory=list)

    @contextmanager
    def recorded(self, layers: Sequence[nn.Module], count: int) -> Iterator[None]:
        """Record what layers add to the last `count` states while a block runs them all."""
        self.of_layer = []

        def record(layer: nn.Module, args: tuple[Tensor, ...], states: Tensor) -> None:
            entering = args[0][:, -count:].to(states.device)
            self.of_layer.append(states[:, -count:] - entering)

        handles = [layer.register_forward_hook(record) for layer in layers]
        try:
            yield
        finally:
            _remove(handles)


class PartialLayer:
    """One layer of a step in which a part of an answer's G places runs.

    Args:
        stored: its keys and values, the answer's last; written over.
        changes: (B, G, D) what it added to the answer's states; written over.
        count: places that run.
    """

    def __init__(self, stored: IndexedLayer, changes: Tensor, count: int) -> None:
        self._changes, self._count = changes, count
        self._entries = stored.entries
        self._keys, self._values = (store[:, :, -changes.shape[1] :] for store in stored.entries)
        self._states: Tensor
        #: (B, count) places that run, ascending, once the layer is reached.
        self.places: Tensor

    def enter(self, layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        """Choose among the states (B, G, D) that enter the layer; return its arguments for those that run."""
        # The library moves a layer's arguments to its card after this hook.
        self._states = args[0].to(self._values.device)
        values: Tensor = layer.self_attn.v_proj(layer.input_layernorm(self._states))
        former, dtype = (
            self._values.transpose(1, 2).flatten(2),
            torch.promote_types(values.dtype, torch.float32),
        )
        likeness = cosine_similarity(values.to(dtype), former.to(dtype), dim=-1)
        order = likeness.argsort(dim=1, stable=True)
        self.places = order[:, : self._count].sort(dim=1).values
        self._values.copy_(values.unflatten(2, (self._values.shape[1], -1)).transpose(1, 2))
        device = self.places.device
        tables = tuple(
            take(table.to(device), self.places, -2) for table in kwargs["position_embeddings"]
        )
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:  # every place sees the same
            mask = mask[:, :, : self._count]
        changed = {"position_embeddings": tables, "attention_mask": mask, "position_ids": None}
        return (take(self._states, self.places, -2), *args[1:]), {**kwargs, **changed}

    def written(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, H_kv, count, Dh) of the places that run; return those of all tokens."""
        index = self.places[:, None, :, None]
        for store, states in ((self._keys, keys), (self._values, values)):
            store.scatter_(2, index.expand_as(states), states)
        return self._entries

    def leave(self, layer: nn.Module, args: tuple[Tensor, ...], states: Tensor) -> Tensor:
        """Return the states (B, G, D) of all places, from those (B, count, D) of the places that ran."""
        index = self.places.unsqueeze(-1).expand_as(states)
        self._changes.scatter_(1, index, states - args[0])
        return (self._states + self._changes).scatter(1, index, states)


@contextmanager
def run_parts(layers: Sequence[nn.Module], parts: Sequence[PartialLayer]) -> Iterator[None]:
    """Let each of the last layers run its part of the places while a block runs all layers."""
    handles: list[RemovableHandle] = []
    for layer, part in zip(layers[len(layers) - len(parts) :], parts, strict=True):
        handles += [
            layer.register_forward_pre_hook(part.enter, with_kwargs=True),
            layer.register_forward_hook(part.leave),
        ]
    try:
        yield
    finally:
        _remove(handles)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
