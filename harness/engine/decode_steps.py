"""Steps of single tokens after a shortened prefill: positions, masks, and the cache entries that a method chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.harness.cost.facts import StackFacts
from espalier.harness.engine.attention_probe import last_row
from espalier.harness.engine.kv_cache import NAME, RowMask
from espalier.harness.engine.layer_inputs import (
    LayerTypes,
    NewTokens,
    decode_mask,
    reference_mask,
    rotary_tables,
)
from espalier.harness.engine.layout import Layout, Stage, fill_padding, groups, take
from espalier.harness.engine.prefill import Rows
from espalier.methods.base import Attended, Site, TokenReducer, View
from espalier.methods.blame import Blame
from espalier.methods.plans import check_attended


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
        self._rows: dict[tuple[int, torch.device, bool], RowMask] = {}
        #: Positions (B, t) of the new tokens as if nothing had been dropped, and the rotary tables of each stage.
        self._positions: Tensor
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
    def needed_by_all(self) -> bool:
        """Whether steps are wrong without it, even for a caller that counts the positions."""
        # A new token may have different positions in later layers than in the first.
        return self.masked or (self._embedding is not None and self._stages[-1].first > 0)

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
            n_new = cache.get_seq_length(0) + hidden.shape[1] - stage.valid.shape[1]
            corrected["attention_mask"] = pad(stage.valid, (0, n_new), value=True)
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
            key = (id(stage), hidden.device)
            if key not in self._tables:
                positions = self._closed_positions(stage)
                self._tables[key] = rotary_tables(self._embedding, hidden, positions)
            changed["position_embeddings"] = self._tables[key]
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
        stage = self.stage(layer).move(hidden.device)
        key = (id(stage), self._types.name(layer), hidden.device)
        if key not in self._typed:
            closed = self._embedding is not None
            positions = self._closed_positions(stage) if closed else self._positions
            step = NewTokens(hidden, positions.to(hidden.device))
            self._typed[key] = self._types.step_arguments(stage, layer, step, cache)
        return self._typed[key]

    def _closed_positions(self, stage: Stage) -> Tensor:
        """Return (B, t): the positions that follow the tokens of a stage."""
        dropped = [a - b for a, b in zip(self._stages[0].counts, stage.counts, strict=True)]
        return self._positions - torch.cat([self._positions.new_full((1, 1), n) for n in dropped])

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
        n_past, config = cache.get_seq_length(layer), self._config
        mask: Tensor | None
        if self._folded:
            mask = None
            if padded or self._emulate:
                rows = self._rows.get(key)
                if rows is None:
                    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
                    rows = RowMask(valid, heads // kv_heads, hidden.dtype)
                if not hides_entries:  # what a step hides changes with each
                    self._rows[key] = rows
                mask = rows.of(n_past + 1)
        elif self._emulate:
            n_new = n_past + hidden.shape[1] - valid.shape[1]
            alive = pad(valid, (0, n_new), value=True)
            mask = reference_mask(config, hidden, alive, n_past)
        else:
            mask = decode_mask(config, hidden, valid, padded, cache, layer)
        self._masks[key] = mask
        return mask

    @property
    def _folded(self) -> bool:
        """Whether steps of one token use folded heads, with masks that need nothing from the library."""
        return bool(self._config._attn_implementation == NAME)


class DecodeStepMask:
    """Calls a method at every decoding step, and turns its answers into hidden slots.

    Nothing leaves the cache, since a later step may need any entry again: masks hide the entries left out at a step.

    Args:
        method: the reducer.
        site: its decode site.
        layout: of the batch.
        stage: tokens alive in the layer below the site.
    """

    def __init__(self, method: TokenReducer, site: Site, layout: Layout, stage: Stage) -> None:
        self._method = method
        self._site = site
        self._stage = stage
        self._keys = tuple(need.key for need in method.needs(site))
        self._shape = layout.visual.shape
        self._groups: list[tuple[Rows, int, Tensor]] = []
        row_groups = groups(stage.counts)
        for n_tokens, members in row_groups:
            if n_tokens:
                rows: Rows = slice(None) if len(row_groups) == 1 else members
                grid = layout.on(stage.origin.device).grid[rows]
                self._groups.append(
                    (rows, n_tokens, take(grid, stage.origin[rows][:, :n_tokens], -2))
                )
        self._last_answers: list[Attended | None] = [None] * len(self._groups)
        self._slots: dict[int, Tensor] = {}
        self._attended: Tensor | None = None
        #: (B,) entries that each step attended to.
        self.counts: list[Tensor] = []

    def hides(self, layer: int) -> bool:
        """Return whether a decoder layer has to leave out entries at this step."""
        return layer >= self._site.layer and self._attended is not None

    def choose(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Get the method's choice, from the new token's attention in the layer below its site.

        Args:
            query: (B, H, 1, Dh) of the new token, rotary positions applied.
            key: (B, H_kv, S, Dh) of all tokens in that layer's cache, the new one included.
            scaling: factor of the logits.

        Cost: O(H S Dh) and the method's cost.
        """
        stage = self._stage.move(query.device)
        new_valid = stage.valid.new_ones(key.shape[0], key.shape[2] - stage.valid.shape[1])
        attention = last_row(query, key, scaling, torch.cat([stage.valid, new_valid], 1))
        attention = take(attention, stage.slots, -1)
        attended = torch.ones(self._shape, dtype=torch.bool, device=attention.device)
        counts = torch.zeros(self._shape[0], dtype=torch.long, device=attention.device)
        for number, (rows, n_tokens, grid) in enumerate(self._groups):
            token_attention = attention[rows][:, :n_tokens]
            no_tokens = token_attention.new_zeros(*token_attention.shape, 0)
            view = View(
                self._site,
                no_tokens,
                grid.to(token_attention.device),
                dict.fromkeys(self._keys, token_attention),
            )
            with Blame(self._method, "attend", self._site):
                answer = self._method.attend(view, self._last_answers[number])
                check_attended(answer, view)
            self._last_answers[number] = answer
            if answer.entries is None:
                counts[rows] = n_tokens
                continue
            counts[rows] = answer.entries.sum(dim=1)
            attended[rows] = attended[rows].scatter(
                1, stage.origin[rows][:, :n_tokens], answer.entries
            )
        attends_all = all(last is not None and last.entries is None for last in self._last_answers)
        self._attended = None if attends_all else attended
        self.counts.append(counts)

    def valid(self, stage: Stage) -> Tensor:
        """Return (B, M): the slots of a stage that this step attends to. Cost: O(B M), no synchronisation."""
        assert self._attended is not None  # called only if `hides`
        n_slots, device = stage.valid.shape[1], stage.valid.device
        if id(stage) not in self._slots:
            # Right-padded entries must not touch a real slot: they are written to an extra column that is cut off.
            self._slots[id(stage)] = fill_padding(stage.slots, stage.counts, n_slots)
        attended = take(self._attended.to(device), stage.origin, -1)
        slots = self._slots[id(stage)].to(device)
        return pad(stage.valid, (0, 1)).scatter(1, slots, attended)[:, :n_slots]


def mean_entries(entries: Tensor, new_tokens: Sequence[int]) -> list[float | None]:
    """Return the mean of (steps, B) entries over each row's steps; None for an answer of a single token.

    Args:
        entries: attended to at each step, on the host.
        new_tokens: tokens of each row; the first is the prefill's, and steps after the last do not count.
    """
    return [
        float(entries[: length - 1, row].double().mean()) if length > 1 else None
        for row, length in enumerate(new_tokens)
    ]
