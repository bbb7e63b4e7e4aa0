"""The producers that a method's needs name, and the moments of a pass at which each of them looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock
from espalier.harness.engine.artifacts.priors import Prior
from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.layout import Layout, Stage
from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.signals.producer import Asked, Context, Producer
from espalier.harness.engine.signals.table import BEFORE_DECODER, INSIDE_TOWER, PRODUCERS
from espalier.harness.engine.visibility import visibility_of
from espalier.methods.base import MethodError, Need, Site, TokenReducer


class Signals:
    """Captures what a method's needs name during a pass and hands it over per visual token.

    Args:
        adapter: the model's facts and modules.
        method: whose needs to serve.
        sites: its sites.
        prior: calibrated prior, for methods that need one.
        stage: returns the stage in force while a decoder layer of a prefill runs, None outside a prefill.

    Raises:
        MethodError: the model lacks a signal, or a calibration is missing.
    """

    def __init__(
        self,
        adapter: Parts,
        method: TokenReducer,
        sites: tuple[Site, ...],
        prior: Prior | None,
        stage: Callable[[], Stage | None],
    ) -> None:
        seen = visibility_of(adapter.decoder.config)
        self._context = Context(adapter, sites, prior, stage, seen)
        self._producers: list[Producer] = []
        self._of: dict[Site, dict[str, Producer]] = {}
        shared: dict[str, Producer] = {}
        for site in sites:
            self._of[site] = {}
            for need in method.needs(site):
                self._check(need)
                if need.signal in INSIDE_TOWER:
                    continue
                found = shared.get(need.key) or self._made(site, need)
                if found.shared:
                    shared[need.key] = found
                self._of[site][need.key] = found

    def _check(self, need: Need) -> None:
        known = self._context.parts.facts.signals
        if need.signal not in known:
            raise MethodError(
                f"signal {need.signal!r} is not available on this model; valid: {', '.join(sorted(known))}"
            )

    def _made(self, site: Site, need: Need) -> Producer:
        kind: type[Producer] = PRODUCERS.load(need.signal)
        made = kind(self._context, site, need)
        self._producers.append(made)
        return made

    # ------------------------------------------------------------------ capturing

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Return what an `AttentionTap` must watch."""
        return [pair for producer in self._producers for pair in producer.watchers()]

    @property
    def watched_layers(self) -> list[nn.Module]:
        """The tower's layers whose outputs are read."""
        return [layer for producer in self._producers for layer in producer.watched_layers]

    def hook_tower(self, clock: Clock) -> list[RemovableHandle]:
        """Watch the tower's layers for one pass, if their states are asked for; the caller removes the handles."""
        return [handle for producer in self._producers for handle in producer.hook_tower(clock)]

    def begin(self, inputs: Mapping[str, Any], given: Mapping[str, Tensor] | None = None) -> None:
        """Forget the last pass; `inputs` are what the next one's model is given.

        Args:
            inputs: of the batch.
            given: what a kept prompt holds of the signals before the decoder, as `kept` returned it.
        """
        for producer in self._producers:
            producer.begin(inputs)
            producer.given = (given or {}).get(producer.need.key)

    def before_decoder(self) -> set[str]:
        """Return the keys of the needs that are read before the decoder."""
        needs = (producer.need for producer in self._producers)
        return {need.key for need in needs if need.signal in BEFORE_DECODER}

    def kept(self) -> dict[str, Tensor]:
        """Return what was read before the decoder, for each unit of the projector."""
        keys = self.before_decoder()
        return {one.need.key: one.units() for one in self._producers if one.need.key in keys}

    def start(self, layout: Layout, hidden: Tensor) -> None:
        """Note what (B, L, D) enters the decoder."""
        for producer in self._producers:
            producer.enter(layout, hidden)

    def reach(self, site: Site, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Note the states (B, M, D) that enter the layer of `site`, before the method is asked."""
        for producer in self._of[site].values():
            producer.reach(stage, hidden, rotary)

    # ------------------------------------------------------------------ handing over

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
        asked = Asked(layout, origin, rows)
        return {key: producer.hand_over(asked) for key, producer in self._of[site].items()}
