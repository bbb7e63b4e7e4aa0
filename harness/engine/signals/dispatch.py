"""The producers of the signals that a method needs, called at each moment of a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.engine.signals.producer import Context, ViewRequest
from espalier.harness.engine.signals.table import BEFORE_DECODER, INSIDE_TOWER, PRODUCERS
from espalier.harness.engine.visibility import visibility_of
from espalier.methods.base import MethodError, PlanError

if TYPE_CHECKING:
    from espalier.harness.cost.clock import Clock
    from espalier.harness.engine.artifacts import Prior
    from espalier.harness.engine.attention_probe import Watcher
    from espalier.harness.engine.layout import Layout, Stage
    from espalier.harness.engine.model_parts import ModelParts
    from espalier.harness.engine.signals.producer import Producer
    from espalier.methods.base import Need, Site, TokenReducer


class Signals:
    """Captures the signals that a method needs during a pass and returns them per visual token.

    Args:
        adapter: the model's facts and modules.
        method: the method with these needs.
        sites: its sites.
        prior: calibrated prior, for methods that need one.
        stage: returns the current stage while a decoder layer of a prefill runs, None outside a prefill.

    Raises:
        MethodError: the model lacks a signal, or a calibration is missing.
    """

    def __init__(
        self,
        adapter: ModelParts,
        method: TokenReducer,
        sites: tuple[Site, ...],
        prior: Prior | None,
        stage: Callable[[], Stage | None],
    ) -> None:
        visibility = visibility_of(adapter.decoder.config)
        self._method = method
        self._context = Context(adapter, sites, prior, stage, visibility)
        self._producers: list[Producer] = []
        self._by_site: dict[Site, dict[str, Producer]] = {}
        shared: dict[str, Producer] = {}
        for site in sites:
            self._by_site[site] = {}
            for need in method.needs(site):
                self._check(need)
                if need.signal in INSIDE_TOWER:
                    continue
                producer = shared.get(need.key) or self._make_producer(site, need)
                if producer.shared:
                    shared[need.key] = producer
                self._by_site[site][need.key] = producer

    def _check(self, need: Need) -> None:
        available = self._context.parts.facts.signals
        if need.signal not in available:
            raise MethodError(
                f"signal {need.signal!r} is not available on this model; valid: {', '.join(sorted(available))}"
            )

    def _make_producer(self, site: Site, need: Need) -> Producer:
        producer_class: type[Producer] = PRODUCERS.load(need.signal)
        producer = producer_class(self._context, site, need)
        self._producers.append(producer)
        return producer

    # ------------------------------------------------------------------ capturing

    def watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Return the modules that an `AttentionTap` must watch, with their watchers."""
        pairs: list[tuple[nn.Module, Watcher]] = []
        for producer in self._producers:
            try:
                pairs += producer.watchers()
            except PlanError as error:
                raise PlanError(f"method {type(self._method).__name__}: {error}") from None
        return pairs

    @property
    def watched_layers(self) -> list[nn.Module]:
        """The tower's layers with outputs that are read."""
        return [layer for producer in self._producers for layer in producer.watched_layers]

    def hook_tower(self, clock: Clock) -> list[RemovableHandle]:
        """Watch the tower's layers for one pass, if their states are needed; the caller removes the handles."""
        return [handle for producer in self._producers for handle in producer.hook_tower(clock)]

    def begin(
        self, inputs: Mapping[str, Any], kept_units: Mapping[str, Tensor] | None = None
    ) -> None:
        """Drop the last pass's captures; `inputs` are those of the next pass.

        Args:
            inputs: of the batch.
            kept_units: a stored prompt's signals before the decoder, as `kept_units` returned them.
        """
        for producer in self._producers:
            producer.begin(inputs)
            producer.kept_units = (kept_units or {}).get(producer.need.key)

    def before_decoder(self) -> set[str]:
        """Return the keys of the needs that are read before the decoder."""
        needs = (producer.need for producer in self._producers)
        return {need.key for need in needs if need.signal in BEFORE_DECODER}

    def kept_units(self) -> dict[str, Tensor]:
        """Return the signals read before the decoder, for each unit of the projector."""
        keys = self.before_decoder()
        return {
            producer.need.key: producer.units()
            for producer in self._producers
            if producer.need.key in keys
        }

    def start(self, layout: Layout, hidden: Tensor) -> None:
        """Capture the states (B, L, D) that enter the decoder."""
        for producer in self._producers:
            producer.enter(layout, hidden)

    def reach(self, site: Site, stage: Stage, hidden: Tensor, rotary: tuple[Tensor, ...]) -> None:
        """Capture the states (B, M, D) that enter the layer of `site`, before the method plans."""
        for producer in self._by_site[site].values():
            producer.reach(stage, hidden, rotary)

    # ------------------------------------------------------------------ handing over

    def collect(
        self, site: Site, layout: Layout, origin: Tensor, rows: list[int] | slice
    ) -> dict[str, Tensor]:
        """Return the signals of `site` for the given rows, on the card of `origin`: the only place that moves them.

        Producers capture where a module runs, and a model may be spread over several cards.

        Args:
            site: the site being decided.
            layout: of the batch (its rows already repeated for beams).
            origin: (b, n) original visual index of the tokens in the view.
            rows: the batch rows of the view.
        """
        request = ViewRequest(layout, origin, rows)
        return {
            key: producer.view_values(request).to(origin.device)
            for key, producer in self._by_site[site].items()
        }
