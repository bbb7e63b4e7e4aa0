"""Decoding steps after a shortened prefill: positions, and a mask for each layer's cache length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.facts import StackFacts
from espalier.harness.engine.layer_types import LayerTypes, NewTokens
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.masks import decode_mask, reference_mask
from espalier.harness.engine.positions import rotary_tables
from espalier.harness.engine.sites.decode import DecodeStepMask
from espalier.harness.engine.text.step_attention import NAME, RowMask


class DecodeSteps:
    """Arguments of decoding steps, derived from the stages of the prefill.

    Args:
        stages: of the prefill, first to last.
        config: text configuration.
        emulate: whether dropped tokens are still in the caches and have to be hidden.
        embedding: the decoder's rotary embedding if gaps are closed after each site; None: positions stay.
        step_mask: chooses at each step which visual entries the upper layers attend to, or None.
        types: of the stack's layers, or None.
        facts: of the stack, if it has layers of linear attention: their steps take no mask.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        config: Any,
        emulate: bool,
        embedding: Any = None,
        step_mask: DecodeStepMask | None = None,
        types: LayerTypes | None = None,
        facts: StackFacts | None = None,
    ) -> None:
        self._stages = stages
        self._config = config
        self._emulate = emulate
        self._embedding = embedding
        self._step_mask = step_mask
        self._types = types
        self._is_linear = (lambda layer: False) if facts is None else facts.is_linear
        #: The layer for which the stack makes its mask.
        self._first_full = 0 if facts is None else facts.full_layers[0]
        self._masks: dict[tuple[int, torch.device, bool], Tensor | None] = {}
        self._rows: dict[tuple[int, torch.device], RowMask] = {}
        #: Positions (B, t) of the new tokens as if nothing had been dropped, and the rotary tables of each stage.
        self._positions: Tensor | None = None
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, ...]] = {}
        self._typed: dict[tuple[int, str, torch.device], dict[str, Any]] = {}

    @property
    def needed(self) -> bool:
        """Whether steps need masks or positions from here; most batches do not."""
        return self.masked or (self._embedding is not None and len(self._stages) > 1)

    @property
    def masked(self) -> bool:
        """Whether steps need masks from here, regardless of who counts the positions."""
        if self._step_mask is not None:
            return True
        if len(self._stages) == 1:
            return False
        if self._emulate or self._types is not None:
            return True
        eager = self._config._attn_implementation == "eager"
        return eager or any(stage.padded for stage in self._stages)

    @property
    def staggered(self) -> bool:
        """Whether a new token has different positions in later layers than in the first."""
        return self._embedding is not None and self._stages[-1].first > 0

    def stage(self, layer: int) -> Stage:
        """Return the stage in force at a decoder layer."""
        return next(stage for stage in reversed(self._stages) if stage.first <= layer)

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Correct the arguments that a step passes to the decoder stack."""
        self._masks.clear()
        self._tables.clear()
        self._typed.clear()
        corrected = dict(kwargs)
        self._positions = kwargs["position_ids"]
        if self._embedding is not None:
            corrected["position_ids"] = self._closed_positions(self.stage(0))
        # If tokens are hidden, the layers' masks hide them.
        stage = self._stages[0] if self._emulate else self.stage(self._first_full)
        hidden, cache = kwargs["inputs_embeds"], kwargs["past_key_values"]
        stage.move(hidden.device)
        corrected["attention_mask"] = None
        if self._types is not None and len(self._stages) > 1:
            corrected["attention_mask"] = {
                name: self._typed_arguments(layer, hidden, cache)["attention_mask"]
                for name, layer in self._types.first_of_each().items()
            }
        elif stage.padded and self._folded and self._types is None:
            corrected["attention_mask"] = self._mask(stage, hidden, cache, 0, hides_entries=False)
        elif stage.padded:
            corrected["attention_mask"] = _extend_valid(
                stage.valid, cache.get_seq_length(0) + hidden.shape[1]
            )
        return corrected

    def layer_arguments(
        self, layer: int, hidden: Tensor, kwargs: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return a decoder layer's arguments for new tokens `hidden` (B, t, D); None if they need no change."""
        stage = self.stage(layer)
        if self._is_linear(layer):
            return None
        hides_entries = self._step_mask is not None and self._step_mask.hides(layer)
        if stage is self._stages[0] and not hides_entries:
            return None
        if self._types is not None:
            return {**kwargs, **self._typed_arguments(layer, hidden, kwargs["past_key_values"])}
        mask = self._mask(stage, hidden, kwargs["past_key_values"], layer, hides_entries)
        changed = {**kwargs, "attention_mask": mask}
        if self._embedding is not None and stage.first > 0:
            changed["position_embeddings"] = self._rotary(stage, hidden)
        return changed

    def mask_key(self, layer: int) -> tuple[int, str]:
        """Return a key that layers share if they see the same entries: their stage and their type."""
        assert self._types is not None
        return id(self.stage(layer)), self._types.name(layer)

    def canvas_mask(self, layer: int, hidden: Tensor, positions: Tensor, cache: Any) -> Any:
        """Return the mask of a layer for a canvas `hidden` (B, G, D) that reads the cache, or None."""
        assert self._types is not None
        stage = self.stage(layer).move(hidden.device)
        step = NewTokens(hidden, positions.to(hidden.device))
        return self._types.canvas_mask(stage, layer, step, cache)

    def _typed_arguments(self, layer: int, hidden: Tensor, cache: Any) -> dict[str, Any]:
        """Return mask and tables of a layer in a stack of several types."""
        assert self._types is not None
        assert self._positions is not None
        stage = self.stage(layer).move(hidden.device)
        key = (id(stage), self._types.name(layer), hidden.device)
        if key not in self._typed:
            positions = self._positions
            if self._embedding is not None:
                positions = self._closed_positions(stage)
            step = NewTokens(hidden, positions.to(hidden.device))
            self._typed[key] = self._types.step_arguments(stage, layer, step, cache)
        return self._typed[key]

    def _closed_positions(self, stage: Stage) -> Tensor:
        """Return (B, t): the positions that follow the tokens of a stage."""
        assert self._positions is not None  # `arguments` has read them
        dropped = [a - b for a, b in zip(self._stages[0].counts, stage.counts, strict=True)]
        shift = torch.tensor(dropped, device=self._positions.device).unsqueeze(1)
        return self._positions - shift

    def _rotary(self, stage: Stage, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the rotary tables of a step, built once for each stage and device."""
        key = (id(stage), hidden.device)
        if key not in self._tables:
            self._tables[key] = rotary_tables(
                self._embedding, hidden, self._closed_positions(stage)
            )
        return self._tables[key]

    def _mask(
        self, stage: Stage, hidden: Tensor, cache: Any, layer: int, hides_entries: bool
    ) -> Tensor | None:
        """Return the mask of a step, built once for each stage and device, with and without hidden entries."""
        key = (id(stage), hidden.device, hides_entries)
        if key in self._masks:
            return self._masks[key]
        stage.move(hidden.device)
        valid, padded = stage.valid, stage.padded
        if hides_entries:
            assert self._step_mask is not None
            valid, padded = self._step_mask.valid(stage), True
        n_past = cache.get_seq_length(layer)
        mask: Tensor | None
        if self._folded:
            mask = None
            if padded or self._emulate:
                mask = self._row_mask(stage, valid, hidden, hides_entries).of(n_past + 1)
        elif self._emulate:
            alive = _extend_valid(valid, n_past + hidden.shape[1])
            mask = reference_mask(self._config, hidden, alive, n_past)
        else:
            mask = decode_mask(self._config, hidden, valid, padded, cache, layer)
        self._masks[key] = mask
        return mask

    @property
    def _folded(self) -> bool:
        """Whether steps of one token use folded heads, with masks that need nothing from the library."""
        return bool(self._config._attn_implementation == NAME)

    def _row_mask(
        self, stage: Stage, valid: Tensor, hidden: Tensor, hides_entries: bool
    ) -> RowMask:
        """Return the mask of a stage's steps, built once; a step that hides entries gets a new one."""
        groups = self._config.num_attention_heads // self._config.num_key_value_heads
        if hides_entries:
            return RowMask(valid, groups, hidden.dtype)
        key = (id(stage), hidden.device)
        if key not in self._rows:
            self._rows[key] = RowMask(valid, groups, hidden.dtype)
        return self._rows[key]


def _extend_valid(valid: Tensor, keys: int) -> Tensor:
    """Return (B, keys): slots that may be seen, including the tokens after the prompt."""
    return torch.cat([valid, valid.new_ones(valid.shape[0], keys - valid.shape[1])], 1)
