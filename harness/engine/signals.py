"""Producers of the signals that methods ask for: each is captured where it arises, once a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from harness.calibration.priors import resize_prior
from harness.engine.layout import Layout, Stage, take
from harness.engine.probe import Watcher, attention_rows, last_row, received_mean
from methods.base import MethodError, Need, Site, TokenReducer

if TYPE_CHECKING:
    from harness.adapters.base import Adapter

#: From (query, key, scaling, valid (B, S)) of one decoder layer to (B, S).
_DECODER: Mapping[str, Callable[[Tensor, Tensor, float, Tensor], Tensor]] = {
    "last_attention": last_row,
    "mean_attention": received_mean,
}


def _class_attention(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    return attention_rows(query[:, :, :1], key, scaling, None)[:, 0, 1:]


def _keys(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    return key[:, :, 1:].mean(1)


#: From (query, key, scaling) of one tower layer to (images, patches, ...); slot 0 is the class token.
_TOWER: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "cls_attention": _class_attention,
    "tower_keys": _keys,
}


class Signals:
    """Captures what a method's needs name during a pass and hands it over per visual token.

    Args:
        adapter: the model's facts and modules.
        method: whose needs to serve.
        sites: its sites.
        prior: (h, w) calibrated prior, for methods that need it.
        stage: returns the stage in force while a decoder layer of a prefill runs, None outside a prefill.
    """

    def __init__(
        self,
        adapter: Adapter,
        method: TokenReducer,
        sites: tuple[Site, ...],
        prior: Tensor | None,
        stage: Callable[[], Stage | None],
    ) -> None:
        self._adapter = adapter
        self._prior = prior
        self._stage = stage
        self._needs = {site: method.needs(site) for site in sites}
        self._tower: dict[str, Tensor] = {}
        self._decoder: dict[tuple[Site, str], Tensor] = {}
        for needs in self._needs.values():
            for need in needs:
                self._check(need)

    def _check(self, need: Need) -> None:
        known = self._adapter.facts.signals
        if need.signal not in known:
            raise MethodError(
                f"signal {need.signal!r} is not available on this model; valid: {', '.join(sorted(known))}"
            )
        if need.signal == "prior" and self._prior is None:
            raise MethodError("signal 'prior' needs a calibration (python -m harness.calibrate)")

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Return what an `AttentionTap` must watch."""
        found: list[tuple[nn.Module, Watcher]] = []
        for site, needs in self._needs.items():
            for need in needs:
                if need.signal in _TOWER:
                    layer = self._adapter.tower_layer(need.layer)
                    found.append((layer.self_attn, self._watch_tower(need)))
                elif need.signal in _DECODER:
                    index = site.layer - 1 if need.layer is None else need.layer
                    module = self._adapter.decoder.layers[index].self_attn
                    found.append((module, self._watch_decoder(site, need)))
        return found

    def _watch_tower(self, need: Need) -> Watcher:
        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            self._tower[need.key] = _TOWER[need.signal](query, key, scaling).flatten(0, 1)

        return watch

    def _watch_decoder(self, site: Site, need: Need) -> Watcher:
        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            stage = self._stage()
            if stage is None:
                return
            scores = _DECODER[need.signal](query, key, scaling, stage.valid)
            # Stored per original visual token, so that a later site finds its own whatever was dropped since.
            per_token = scores.new_zeros(stage.slots.shape[0], int(self._width))
            per_token.scatter_(1, stage.origin, take(scores, stage.slots, -1))
            self._decoder[site, need.key] = per_token

        return watch

    def start(self, layout: Layout) -> None:
        """Forget the last pass's decoder signals and note the width of the new batch."""
        self._decoder.clear()
        self._width = layout.visual.shape[1]

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
            if need.signal in _TOWER:
                source = take(layout.source[rows], origin, -1)
                found[need.key] = self._tower[need.key][source]
            elif need.signal in _DECODER:
                found[need.key] = take(self._decoder[site, need.key][rows], origin, -1)
            elif need.signal == "prior":
                assert self._prior is not None  # checked on construction
                grid = layout.grid[rows]
                found[need.key] = take(resize_prior(self._prior.to(grid.device), grid), origin, -1)
        return found
