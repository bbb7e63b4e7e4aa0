"""Producers of the signals that methods ask for: each is captured where it arises, once a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harness.artifacts.priors import Prior, resize_prior
from harness.engine.layout import Layout, Stage, mix, take
from harness.engine.massmaps import MASSES, asking, received_max, words_behind
from harness.engine.next_row import NextRow
from harness.engine.probe import (
    Watcher,
    attention_rows,
    last_row,
    mean_logits,
    received_everywhere,
    received_mean,
    word_rows,
)
from harness.engine.rollout import Heads, rollout_of_words
from harness.engine.tower_states import TowerStates
from harness.measure.clock import Clock
from methods.base import MethodError, Need, Site, TokenReducer

if TYPE_CHECKING:
    from harness.engine.parts import Parts

#: From (query, key, scaling, valid (B, S)) of one decoder layer to (B, S).
_SCORES: Mapping[str, Callable[[Tensor, Tensor, float, Tensor], Tensor]] = {
    "last_attention": last_row,
    "mean_attention": received_mean,
}

#: What a layer of the tower says about each unit.
_TOWER = ("cls_attention", "cls_logits", "tower_keys", "wide_cls_attention", "wide_tower_keys")

#: What is read before the decoder, so that a kept prompt can hold it, for each unit.
BEFORE_DECODER = frozenset({*_TOWER, "tower_states", "luma"})

#: States of one decoder layer, rotary positions applied.
_STATES = ("visual_keys", "text_queries", "text_keys")

#: Captured for each word of the prompt, 0 where a row has fewer.
_OF_WORDS = ("text_queries", "text_keys", "text_states", "text_normed")


class Signals:
    """Captures what a method's needs name during a pass and hands it over per visual token.

    Args:
        adapter: the model's facts and modules.
        method: whose needs to serve.
        sites: its sites.
        prior: calibrated prior, for methods that need one.
        stage: returns the stage in force while a decoder layer of a prefill runs, None outside a prefill.
    """

    def __init__(
        self,
        adapter: Parts,
        method: TokenReducer,
        sites: tuple[Site, ...],
        prior: Prior | None,
        stage: Callable[[], Stage | None],
    ) -> None:
        self._adapter = adapter
        self._class_attention = adapter.facts.class_attention
        self._prior = prior
        self._stage = stage
        self._needs = {site: method.needs(site) for site in sites}
        self._tower: dict[str, list[Tensor]] = {}
        self._decoder: dict[tuple[Site, str], Tensor] = {}
        self._next_rows: dict[Site, NextRow] = {}
        self._projected: Tensor | None = None
        self._embeddings: Tensor | None = None
        self._inputs: Mapping[str, Any] = {}
        self._luma: Tensor | None = None
        self._given: Mapping[str, Tensor] = {}
        for needs in self._needs.values():
            for need in needs:
                self._check(need)
        named = {need.signal for needs in self._needs.values() for need in needs}
        extra = int(self._class_attention == "token")
        self._states = TowerStates(adapter, extra) if "tower_states" in named else None

    def _check(self, need: Need) -> None:
        known = self._adapter.facts.signals
        if need.signal not in known:
            raise MethodError(
                f"signal {need.signal!r} is not available on this model; valid: {', '.join(sorted(known))}"
            )
        if need.signal == "prior" and self._prior is None:
            raise MethodError("signal 'prior' needs a calibration (python -m harness.calibration)")

    # ------------------------------------------------------------------ capturing

    def hook_tower(self, clock: Clock) -> list[RemovableHandle]:
        """Watch the tower's layers for one pass, if their states are asked for; the caller removes the handles."""
        return [] if self._states is None else self._states.hook(clock)

    @property
    def watched_layers(self) -> list[nn.Module]:
        """The tower's layers whose states are asked for."""
        return [] if self._states is None else self._states.watched

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Return what an `AttentionTap` must watch."""
        found: list[tuple[nn.Module, Watcher]] = []
        shared: set[str] = set()
        for site, needs in self._needs.items():
            for need in needs:
                if need.key in shared:
                    continue  # the tower's signals are the same at every site
                if need.signal in _TOWER:
                    pooled = "keys" not in need.signal and self._class_attention == "probe"
                    module = (
                        self._adapter.pooling_attention()
                        if pooled
                        else self._adapter.tower_attention(need.layer)
                    )
                    shared.add(need.key)
                    found.append((module, self._watch_tower(need)))
                elif need.signal == "next_last_attention":
                    layer = self._adapter.decoder.layers[site.layer]
                    self._next_rows[site] = NextRow(layer)
                    found.append((layer.self_attn, self._next_rows[site].watch))
                elif need.signal == "text_rollout":
                    found += self._watch_rollout(site, need)
                elif need.signal in (*_SCORES, *_STATES, *MASSES, "text_attention"):
                    index = site.layer - 1 if need.layer is None else need.layer
                    module = self._adapter.decoder.layers[index].self_attn
                    found.append((module, self._watch_decoder(site, need)))
        return found

    def _watch_tower(self, need: Need) -> Watcher:
        """Keep, for each call of the tower's layer, one value for each unit that goes into the projector."""
        extra = int(self._class_attention == "token")

        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            if need.signal.startswith("wide"):
                query, key = _one_head(query), _one_head(key)
                scaling = query.shape[-1] ** -0.5
            if need.signal.endswith("keys"):
                values = key[:, :, extra:].mean(1)
            elif need.signal == "cls_logits":
                asked = query if self._class_attention == "mean" else query[:, :, :1]
                values = mean_logits(asked, key, scaling)[:, extra:]
            elif self._class_attention in ("token", "probe"):
                # One query a picture: the class token, or the probe of the pooling head.
                values = attention_rows(query[:, :, :1], key, scaling, None)[:, 0, extra:]
            else:
                values = received_everywhere(query, key, scaling)
            self._tower.setdefault(need.key, []).append(self._adapter.to_units(values))

        return watch

    def _watch_decoder(self, site: Site, need: Need) -> Watcher:
        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            stage = self._stage()
            if stage is None:
                return
            stage.move(query.device)
            if need.signal == "visual_keys":
                found = self._per_token(stage, key.transpose(1, 2))
            elif need.signal in _OF_WORDS:
                found = _of_words(query if need.signal == "text_queries" else key, stage.words)
            elif need.signal == "text_attention":
                weights = word_rows(query, key, scaling, stage.valid, stage.words)
                found = self._per_token(stage, weights.transpose(1, 2))
            elif need.signal in MASSES:
                slots = asking(need.signal, stage, self._behind)
                found = self._per_token(
                    stage, received_max(query, key, scaling, stage.valid, slots)
                )
            else:
                found = self._per_token(
                    stage, _SCORES[need.signal](query, key, scaling, stage.valid)
                )
            self._decoder[site, need.key] = found

        return watch

    def _watch_rollout(self, site: Site, need: Need) -> list[tuple[nn.Module, Watcher]]:
        """Watch the decoder layers since the last site that takes effect between layers."""
        starts = (one.shortens or 0 for one in self._needs)
        earlier = [start for start in starts if start < site.layer]
        window = range(max(earlier, default=0), site.layer)
        heads: list[Heads] = []

        def watcher(index: int) -> Watcher:
            def watch(query: Tensor, key: Tensor, scaling: float) -> None:
                stage = self._stage()
                if stage is None:
                    return
                stage.move(query.device)
                if index == window[0]:
                    heads.clear()
                heads.append((query, key, scaling))
                if index == window[-1]:
                    rows = rollout_of_words(heads, stage.valid, stage.words)
                    self._decoder[site, need.key] = self._per_token(stage, rows.transpose(1, 2))
                    heads.clear()

            return watch

        layers = self._adapter.decoder.layers
        return [(layers[index].self_attn, watcher(index)) for index in window]

    def _per_token(self, stage: Stage, values: Tensor) -> Tensor:
        """Store (B, S, ...) per original visual token, so that a later site finds its own whatever is gone by then."""
        flat = values.flatten(2) if values.dim() > 2 else values.unsqueeze(-1)
        table = flat.new_zeros(stage.slots.shape[0], self._width, flat.shape[2])
        table.scatter_(
            1, stage.origin.unsqueeze(-1).expand(-1, -1, flat.shape[2]), take(flat, stage.slots, -2)
        )
        return table.view(*table.shape[:2], *values.shape[2:])

    def begin(self, inputs: Mapping[str, Any], given: Mapping[str, Tensor] | None = None) -> None:
        """Forget the last pass; `inputs` are what the next one's model is given.

        Args:
            inputs: of the batch.
            given: what a kept prompt holds of the signals before the decoder, as `kept` returned it.
        """
        self._inputs = inputs
        self._given = given or {}
        self._luma = None
        self._tower.clear()
        self._decoder.clear()
        self._projected = None
        self._embeddings = None

    def start(self, layout: Layout, hidden: Tensor) -> None:
        """Note the widths of the batch and its visual tokens in (B, L, D) as they enter the decoder."""
        self._decoder.clear()
        self._width = layout.visual.shape[1]
        self._behind = words_behind(layout)
        wanted = {need.signal for needs in self._needs.values() for need in needs}
        if wanted & {"projected", "all_projected"}:
            self._projected = take(hidden, layout.visual, -2)
        if "text_embeddings" in wanted:
            self._embeddings = _of_words(hidden, layout.words)

    def reach(self, site: Site, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Note the states (B, M, D) that enter the layer of `site`, before the method is asked."""
        for need in self._needs[site]:
            if need.signal == "next_last_attention":
                row = self._next_rows[site].last(hidden, rotary, stage.valid)
                self._decoder[site, need.key] = self._per_token(stage, row)
                continue
            if need.signal == "normed":
                found = self._per_token(stage, hidden)
            elif need.signal in ("text_states", "text_normed"):
                found = _of_words(hidden, stage.words)
            else:
                continue
            plain = need.signal == "text_states"
            self._decoder[site, need.key] = found if plain else self._adapter.decoder.norm(found)

    # ------------------------------------------------------------------ handing over

    def before_decoder(self) -> set[str]:
        """Return the keys of the needs that are read before the decoder."""
        needs = (need for needs in self._needs.values() for need in needs)
        return {need.key for need in needs if need.signal in BEFORE_DECODER}

    def kept(self) -> dict[str, Tensor]:
        """Return what was read before the decoder, for each unit; without pictures there is nothing."""
        found: dict[str, Tensor] = {}
        for need in {need.key: need for needs in self._needs.values() for need in needs}.values():
            if need.key in self.before_decoder():
                found[need.key] = self._units(need)
        return found

    def _units(self, need: Need) -> Tensor:
        """Return (units,) or (units, ...): what the tower or its pixels said about each unit."""
        if need.key in self._given:
            return self._given[need.key]
        if need.signal == "luma":
            if self._luma is None:
                self._luma = self._adapter.pictures(self._inputs).luma()
            return self._luma
        if need.signal == "tower_states":
            assert self._states is not None  # made on construction
            return self._states.mean()
        return torch.cat(self._tower[need.key])

    def collect(
        self, site: Site, layout: Layout, origin: Tensor, rows: list[int] | slice
    ) -> dict[str, Tensor]:
        """Return the signals of `site` for the given rows.

        Args:
            site: the site being decided.
            layout: of the batch (its rows already repeated for beams).
            origin: (b, n) original visual index of the tokens in the view.
            rows: the batch rows of the view.
        """
        found: dict[str, Tensor] = {}
        for need in self._needs[site]:
            if need.signal in (*_TOWER, "tower_states"):
                units = self._units(need).to(origin.device)
                share = None if layout.share is None else take(layout.share[rows], origin, -2)
                found[need.key] = _mixed(units, take(layout.source[rows], origin, -2), share)
            elif need.signal in _OF_WORDS:
                found[need.key] = self._decoder[site, need.key][rows]
            elif need.signal in ("text_attention", "text_rollout"):
                weights = self._decoder[site, need.key][rows]
                chosen = take(weights, origin.to(weights.device), -2)
                found[need.key] = chosen.transpose(1, 2)
            elif need.signal == "normed":
                states = self._decoder[site, need.key][rows]
                found[need.key] = take(states, origin.to(states.device), -2)
            elif need.signal == "text_embeddings":
                assert self._embeddings is not None  # taken when the pass entered the decoder
                found[need.key] = self._embeddings[rows]
            elif need.signal == "all_projected":
                assert self._projected is not None  # taken when the pass entered the decoder
                real = _real(layout, rows).to(self._projected.device)
                found[need.key] = self._projected[rows] * real.unsqueeze(-1)
            elif need.signal == "visual_keys":
                states = self._decoder[site, need.key][rows]
                chosen = take(states.flatten(2), origin.to(states.device), -2)
                found[need.key] = chosen.view(*chosen.shape[:2], *states.shape[2:]).transpose(1, 2)
            elif need.signal in (*_SCORES, *MASSES, "next_last_attention"):
                scores = self._decoder[site, need.key][rows]
                found[need.key] = take(scores, origin.to(scores.device), -1)
            elif need.signal == "projected":
                assert self._projected is not None  # taken when the pass entered the decoder
                found[need.key] = take(self._projected[rows], origin.to(self._projected.device), -2)
            elif need.signal == "luma":
                luma = self._units(need)
                unit = take(layout.source[rows], origin, -2)[..., 0]  # such tokens are one unit
                found[need.key] = luma[unit.to(luma.device)]
            elif need.signal == "prior":
                assert self._prior is not None  # checked on construction
                grid = layout.grid[rows]
                prior = tuple(values.to(grid.device) for values in self._prior)
                found[need.key] = take(resize_prior(prior, grid), origin, -1)
            else:
                found[need.key] = _place(need.signal, layout, origin, rows)
        return found


def _one_head(states: Tensor) -> Tensor:
    """Return (B, 1, S, H Dh) of (B, H, S, Dh)."""
    return states.transpose(1, 2).flatten(2).unsqueeze(1)


def _of_words(states: Tensor, words: Tensor) -> Tensor:
    """Return the (B, ..., T, D) states in the slots `words` (B, T) of (B, ..., M, D); words are never dropped."""
    real = (words >= 0).view(words.shape[0], *[1] * (states.dim() - 3), -1, 1)
    return take(states, words.clamp(min=0), -2) * real


def _real(layout: Layout, rows: list[int] | slice) -> Tensor:
    """Return (b, M): which entries of `layout.visual` are real tokens of these rows."""
    counts = torch.tensor(layout.counts, device=layout.visual.device)[rows]
    place = torch.arange(layout.visual.shape[1], device=layout.visual.device)
    return place < counts.unsqueeze(1)


def _mixed(units: Tensor, source: Tensor, share: Tensor | None) -> Tensor:
    """Blend per-unit values (units,) or (units, D) the way the model blends the units into visual tokens."""
    if units.dim() == 1:
        return mix(units.unsqueeze(-1), source, share).squeeze(-1)
    return mix(units, source, share)


def _place(signal: str, layout: Layout, origin: Tensor, rows: list[int] | slice) -> Tensor:
    """Return crops, or positions in the row's own prompt (padding not counted)."""
    if signal == "tile":
        return take(layout.tile[rows], origin, -1)
    padding = (~layout.valid[rows]).sum(1, keepdim=True)
    if signal == "visual_positions":
        return take(layout.visual[rows], origin, -1) - padding
    if signal == "all_positions":
        return torch.where(_real(layout, rows), layout.visual[rows] - padding, -1)
    words = layout.words[rows]
    return torch.where(words < 0, words, words - padding)
