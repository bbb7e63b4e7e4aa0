"""Entries of a cached prompt that merge in a denoising step, behind the layer in which its deciders look at them."""

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
from espalier.harness.engine.positions import closed, rotary_at
from espalier.harness.engine.prefix_cache import CachedPrompt
from espalier.harness.engine.record import Record
from espalier.harness.engine.session_setup import Setup
from espalier.harness.engine.text.kv_cache import IndexedLayer
from espalier.methods.denoiser import as_denoiser
from espalier.methods.select.entries import Entries


class MergedLayer(IndexedLayer):
    """A layer of one step: entries that are made when the layer is reached, and the answer's places behind them.

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
        """Return the entries with the new tokens behind them; nothing is kept."""
        keys, values = self._make()
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


class Merging:
    """One step's choice, and the layers that follow from it. The prompt's own cache is only read.

    Args:
        setup: of the session; its method merges entries.
        held: the prompt.
        deciders: (B, G) booleans.
        keep: visual tokens that stay, for each row.
    """

    def __init__(
        self, setup: Setup, held: CachedPrompt, deciders: Tensor, keep: Sequence[int]
    ) -> None:
        method = as_denoiser(setup.method)
        assert method is not None  # whoever merges is one
        self._setup, self._held, self._deciders = setup, held, deciders
        self._clock = Clock(*setup.adapter.devices, enabled=setup.timed)
        self._method = method
        #: First layer whose entries merge.
        self.behind = setup.sites[0].layer + 1
        self._keep = tuple(keep)
        (self._whole,) = held.stages
        #: Whether every token of every row stays, so that there is nothing to do.
        self.idle = self._keep == self._whole.counts
        self._lengths = [n + text for n, text in zip(keep, held.layout.text, strict=True)]
        #: (K,) of each row: which of its visual tokens stay, once the deciders' layer has run.
        self.kept: list[Tensor] = []
        self._tables: dict[torch.device, tuple[Tensor, ...]] = {}

    @property
    def watched(self) -> tuple[Any, Callable[[Tensor, Tensor, float], None]]:
        """The attention that the deciders look with, and what looks on."""
        return self._setup.adapter.decoder.layers[self.behind - 1].self_attn, self._look

    def stages(self) -> tuple[Stage, Stage]:
        """Return who is alive up to the deciders' layer and behind it; of the latter, all but which slots."""
        whole, width = self._whole, max(self._lengths)
        lengths = torch.tensor(self._lengths, device=whole.valid.device).unsqueeze(1)
        valid = torch.arange(width, device=whole.valid.device) >= width - lengths
        none = whole.slots[:, :0]
        padded = any(length != width for length in self._lengths)
        return whole, Stage(self.behind, valid, padded, none, self._keep, none, none)

    def cache(self) -> Cache:
        """Return the cache of this step: the prompt's own layers, then merged ones."""
        own, width = self._held.cache.indexed, max(self._lengths)
        merged = [MergedLayer(partial(self._of, layer), width) for layer in own[self.behind :]]
        return Cache(layers=[*own[: self.behind], *merged])

    def records(self) -> tuple[Record, ...]:
        """Return what the step left of each row."""
        found: list[Record] = []
        selecting = self._clock.totals_ms().get("select", 0.0) / len(self._keep)
        for row, (record, keep) in enumerate(zip(self._held.records, self._keep, strict=True)):
            above = (keep,) * (len(record.entering) - self.behind)
            step = replace(
                record,
                requested=(keep,),
                kept=(keep,),
                entering=record.entering[: self.behind] + above,
                held=record.entering,
                origin=record.origin if self.idle else self.kept[row].cpu(),
                times_ms={"select": selecting},
            )
            found.append(step)
        return tuple(found)

    def _look(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Choose in every row by what its deciders pay."""
        with self._clock.phase("select"):
            stage = self._whole.move(query.device)
            alive = torch.cat([stage.valid, stage.valid.new_ones(self._deciders.shape)], 1)
            rows = attention_rows(query, key, scaling, alive[:, None, None, :])
            paid = (rows * self._deciders.to(rows.device).unsqueeze(2)).sum(1)
            for row, (count, keep) in enumerate(zip(stage.counts, self._keep, strict=True)):
                scores = paid[row : row + 1, stage.slots[row, :count]]
                chosen = self._method.chosen(scores, keep)[0] if count else stage.slots[row, :0]
                self.kept.append(chosen)

    def _of(self, layer: IndexedLayer) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H_kv, S', D) of a layer, rows of fewer entries padded on the left."""
        with self._clock.phase("select"):
            stage, (keys, values) = self._whole, layer.held
            stage.move(keys.device)
            width, found = max(self._lengths), list[list[Tensor]]()
            for row, (length, keep) in enumerate(zip(self._lengths, self._keep, strict=True)):
                start = keys.shape[2] - length - stage.counts[row] + keep
                own = keys[row, :, start:], values[row, :, start:]
                if keep < stage.counts[row]:
                    own = self._merged(row, start, *own)
                found.append([pad(store, (0, 0, width - length, 0)) for store in own])
            return torch.stack([k for k, _ in found]), torch.stack([v for _, v in found])

    def _merged(self, row: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return one row's merged keys and values (H_kv, S', D) in the model's type."""
        stage, exact = self._whole, torch.promote_types(keys.dtype, torch.float32)
        tables = [table[row, start:].to(exact) for table in self._rotary(keys)]
        entries = Entries(
            keys=unrotated(keys.to(exact), *tables),
            values=values.to(exact),
            visual=stage.slots[row, : stage.counts[row]] - start,
            kept=self.kept[row].to(keys.device),
        )
        merged, beside = self._method.merged(entries)
        # Gaps are closed by counting from the first token on.
        places = slice(0, merged.shape[1]) if self._setup.renumber else entries.staying
        turned = rotated(merged, *(table[places] for table in tables))
        return turned.to(keys.dtype), beside.to(values.dtype)

    def _rotary(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Return the tables (B, S, D) of the prompt's positions, as the model has turned its keys by them."""
        if keys.device not in self._tables:
            embedding = self._setup.adapter.decoder.rotary_emb
            at = closed(self._whole.valid.to(keys.device))
            self._tables[keys.device] = rotary_at(embedding, keys, at)
        return self._tables[keys.device]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return (..., S, D) turned by tables (S, d): pairs are d / 2 apart; what lies behind the first d stays."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what `rotated` by the same tables makes `x` of, however they are scaled or rounded."""
    scale = cos.square() + sin.square()
    return rotated(x, cos / scale, -sin / scale)
