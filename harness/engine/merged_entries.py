"""Merge entries of a cached prompt in a denoising step, in the layers after the one where its deciders score them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.attention_probe import attention_rows
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.positions import closed_positions, rotary_tables
from espalier.harness.engine.prefix_cache import CachedPrompt
from espalier.harness.engine.record import Record
from espalier.harness.engine.session_setup import SessionSetup
from espalier.harness.engine.text.kv_cache import IndexedLayer
from espalier.methods.denoiser import as_denoiser
from espalier.methods.select.entries import Entries


class MergedLayer(IndexedLayer):
    """A layer of one step: entries computed when the layer is reached, followed by the answer's positions.

    Args:
        make: returns keys and values (B, H_kv, S', D).
        length: S'.
    """

    def __init__(self, make: Callable[[], tuple[Tensor, Tensor]], length: int) -> None:
        super().__init__(room=0)
        self._make = make
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the entries followed by the new tokens; nothing is stored."""
        keys, values = self._make()
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


class EntryMerger:
    """One step's choice, and the layers that follow from it. The prompt's cache is only read.

    Args:
        setup: of the session; its method merges entries.
        cached_prompt: the prompt.
        deciders: (B, G) booleans.
        keep: visual tokens that stay, for each row.
    """

    def __init__(
        self,
        setup: SessionSetup,
        cached_prompt: CachedPrompt,
        deciders: Tensor,
        keep: Sequence[int],
    ) -> None:
        method = as_denoiser(setup.method)
        assert method is not None  # only denoisers merge
        self._setup, self._prompt, self._deciders = setup, cached_prompt, deciders
        self._clock = Clock(*setup.adapter.devices, enabled=setup.timed)
        self._method = method
        #: First layer with merged entries.
        self.first_merged = setup.sites[0].layer + 1
        self._keep = tuple(keep)
        (self._prompt_stage,) = cached_prompt.stages
        #: Whether every token of every row stays.
        self.idle = self._keep == self._prompt_stage.counts
        self._lengths = [n + text for n, text in zip(keep, cached_prompt.layout.text, strict=True)]
        #: (K,) kept visual tokens of each row, once the deciders' layer has run.
        self.kept: list[Tensor] = []
        self._tables: dict[torch.device, tuple[Tensor, ...]] = {}

    @property
    def watched_attention(self) -> tuple[Any, Callable[[Tensor, Tensor, float], None]]:
        """The attention module of the deciders' layer, and its watcher."""
        return self._setup.adapter.decoder.layers[self.first_merged - 1].self_attn, self._choose

    def stages(self) -> tuple[Stage, Stage]:
        """Return the stages up to the deciders' layer and after it; the second without slots."""
        prompt_stage, width = self._prompt_stage, max(self._lengths)
        lengths = torch.tensor(self._lengths, device=prompt_stage.valid.device).unsqueeze(1)
        valid = torch.arange(width, device=prompt_stage.valid.device) >= width - lengths
        empty = prompt_stage.slots[:, :0]
        padded = any(length != width for length in self._lengths)
        return prompt_stage, Stage(
            self.first_merged, valid, padded, empty, self._keep, empty, empty
        )

    def cache(self) -> Cache:
        """Return the cache of this step: the prompt's layers, then merged ones."""
        prompt_layers, width = self._prompt.cache.indexed, max(self._lengths)
        merged = [
            MergedLayer(partial(self._layer_entries, layer), width)
            for layer in prompt_layers[self.first_merged :]
        ]
        return Cache(layers=[*prompt_layers[: self.first_merged], *merged])

    def records(self) -> tuple[Record, ...]:
        """Return each row's record of the step."""
        step_records: list[Record] = []
        select_ms = self._clock.totals_ms().get("select", 0.0) / len(self._keep)
        for row, (record, keep) in enumerate(zip(self._prompt.records, self._keep, strict=True)):
            upper_layers = (keep,) * (len(record.entering) - self.first_merged)
            step = replace(
                record,
                requested=(keep,),
                kept=(keep,),
                entering=record.entering[: self.first_merged] + upper_layers,
                held=record.entering,
                origin=record.origin if self.idle else self.kept[row].cpu(),
                times_ms={"select": select_ms},
            )
            step_records.append(step)
        return tuple(step_records)

    def _choose(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Choose in every row by the attention of its deciders."""
        with self._clock.phase("select"):
            stage = self._prompt_stage.move(query.device)
            alive = torch.cat([stage.valid, stage.valid.new_ones(self._deciders.shape)], 1)
            rows = attention_rows(query, key, scaling, alive[:, None, None, :])
            attention = (rows * self._deciders.to(rows.device).unsqueeze(2)).sum(1)
            for row, (count, keep) in enumerate(zip(stage.counts, self._keep, strict=True)):
                scores = attention[row : row + 1, stage.slots[row, :count]]
                chosen = self._method.chosen(scores, keep)[0] if count else stage.slots[row, :0]
                self.kept.append(chosen)

    def _layer_entries(self, layer: IndexedLayer) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H_kv, S', D) of a layer, rows of fewer entries padded on the left."""
        with self._clock.phase("select"):
            stage, (keys, values) = self._prompt_stage, layer.entries
            stage.move(keys.device)
            width, rows = max(self._lengths), list[list[Tensor]]()
            for row, (length, keep) in enumerate(zip(self._lengths, self._keep, strict=True)):
                start = keys.shape[2] - length - stage.counts[row] + keep
                entries = keys[row, :, start:], values[row, :, start:]
                if keep < stage.counts[row]:
                    entries = self._merge_row(row, start, *entries)
                rows.append([pad(store, (0, 0, width - length, 0)) for store in entries])
            return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])

    def _merge_row(
        self, row: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return one row's merged keys and values (H_kv, S', D) in the model's type."""
        stage, dtype = self._prompt_stage, torch.promote_types(keys.dtype, torch.float32)
        tables = [table[row, start:].to(dtype) for table in self._rotary(keys)]
        entries = Entries(
            keys=unrotate(keys.to(dtype), *tables),
            values=values.to(dtype),
            visual=stage.slots[row, : stage.counts[row]] - start,
            kept=self.kept[row].to(keys.device),
        )
        merged_keys, merged_values = self._method.merged(entries)
        # Closed gaps: positions count from the first token.
        places = slice(0, merged_keys.shape[1]) if self._setup.renumber else entries.left
        rotated_keys = rotate(merged_keys, *(table[places] for table in tables))
        return rotated_keys.to(keys.dtype), merged_values.to(values.dtype)

    def _rotary(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Return the tables (B, S, D) of the prompt's positions, as the model applied them to its keys."""
        if keys.device not in self._tables:
            embedding = self._setup.adapter.decoder.rotary_emb
            positions = closed_positions(self._prompt_stage.valid.to(keys.device))
            self._tables[keys.device] = rotary_tables(embedding, keys, positions)
        return self._tables[keys.device]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return (..., S, D) rotated by tables (S, d): pairs are d / 2 apart; dimensions after the first d stay."""
    width = cos.shape[-1]
    rotated_part, unrotated_part = x[..., :width], x[..., width:]
    first_half, second_half = rotated_part.chunk(2, -1)
    return torch.cat(
        [rotated_part * cos + torch.cat([-second_half, first_half], -1) * sin, unrotated_part], -1
    )


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the inverse of `rotate` by the same tables, also if they are scaled or rounded."""
    scale = cos.square() + sin.square()
    return rotate(x, cos / scale, -sin / scale)
