"""Watchers of a method's signals, installed for the life of a session and inactive while nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from espalier.harness.engine.attention_probe import AttentionTap
from espalier.harness.engine.engine_guards import check_proved
from espalier.harness.engine.positions import closes_gaps
from espalier.harness.engine.session_setup import SessionSetup
from espalier.harness.engine.signals.dispatch import Signals
from espalier.harness.engine.sites.decode import decode_site
from espalier.harness.engine.sites.site_table import check_site_kinds, tower_sites
from espalier.harness.engine.tower.tower_views import watched_blocks
from espalier.harness.engine.vision_pass import split_idle
from espalier.methods.base import MethodError

if TYPE_CHECKING:
    from espalier.harness.cost.budget import Budget
    from espalier.harness.cost.clock import Clock
    from espalier.harness.engine.artifacts.priors import Prior
    from espalier.harness.engine.attention_probe import Watcher
    from espalier.harness.engine.forward_pass import Pass
    from espalier.harness.engine.layout import Stage
    from espalier.harness.engine.model_parts import ModelParts
    from espalier.harness.engine.session_setup import CacheEvictor
    from espalier.harness.specs.run_spec import PositionPolicy
    from espalier.methods.base import Site, TokenReducer


class ActivePass:
    """The pass in progress, for watchers that outlive it."""

    def __init__(self) -> None:
        self._pass: Pass | None = None
        self._clock: Clock | None = None

    @contextmanager
    def running(self, clock: Clock, current_pass: Pass | None = None) -> Iterator[None]:
        """Activate the watchers inside the block; `current_pass` is None if no decoder will run."""
        self._pass, self._clock = current_pass, clock
        try:
            yield
        finally:
            self._pass = self._clock = None

    def stage(self) -> Stage | None:
        """Return the current stage while a prefill runs, None otherwise."""
        return None if self._pass is None else self._pass.prefill.active_stage()

    def as_selection(self, watcher: Watcher, in_decoder: bool) -> Watcher:
        """Return the watcher, timed as selection and inactive outside a run, of the decoder outside a prefill."""

        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            # A phase waits for the device, which a decoding step need not do.
            if self._clock is not None and not (in_decoder and self.stage() is None):
                with self._clock.phase("select"):
                    watcher(query, key, scaling)

        return watch

    def watch_tower(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Pass queries and keys of a tower block to the sites inside the tower."""
        if self._pass is not None:
            for sites in self._pass.sites:
                sites.watch(query, key, scaling)

    def watch_cache(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Pass queries and keys of a decoder layer to the cache eviction."""
        if self._pass is not None and self._pass.eviction is not None:
            self._pass.eviction.score_layer(layer, query, key, scaling)

    def watch_step(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Pass queries and keys of the layer below a decode site; this counts as decoding, not as selection."""
        if self._pass is not None and self._pass.step_mask is not None:
            self._pass.step_mask.choose(query, key, scaling)


def install(
    adapter: ModelParts,
    method: TokenReducer,
    budget: Budget,
    *,
    seed: int,
    emulate: bool,
    positions: PositionPolicy,
    prior: Prior | None,
    timed: bool,
    active: ActivePass,
    evicting: CacheEvictor | None = None,
    by_item: bool = False,
) -> tuple[SessionSetup, AttentionTap]:
    """Return the setup shared by all passes of a session, and the tap that feeds the watchers.

    Raises:
        MethodError: the model cannot run the method.
        UserError: the model's attention is not supported, or its class was not proved where the method acts.
    """
    depth = adapter.facts.text.layers
    sites = method.all_sites(adapter.facts.tower.layers, depth)
    check_site_kinds(method, sites)
    step_site = decode_site(method, depth)
    cache = () if evicting is None else ("cache",)
    steps = () if step_site is None else ("decode",)
    places = (*(site.where for site in sites), *cache, *steps)
    check_proved(adapter.facts, f"method={type(method).__name__}", places)
    partial_layers = [layer for layer in range(depth) if not adapter.holds_prompt(layer)]
    if step_site is not None and partial_layers:
        raise MethodError(
            f"{type(method).__name__} chooses entries at each step, and layers {', '.join(map(str, partial_layers))} "
            "do not hold the whole prompt; valid: a method that drops tokens before the first step"
        )
    renumber = closes_gaps(positions, method, adapter.facts)
    signals = Signals(adapter, method, sites, prior, stage=active.stage)
    tower_blocks = watched_blocks(adapter, method, tower_sites(sites))
    watchers = [
        *signals.watchers(),
        *((block.attention, active.watch_tower) for block in tower_blocks),
        *_cache_watchers(adapter, evicting, active),
    ]
    watched_modules = [*(module for module, _ in watchers), *signals.watched_layers]
    # Tower blocks that the projector does not read: those that a method reads, and idle ones.
    extra, idle = split_idle(adapter.unread_blocks(), watched_modules)
    setup = SessionSetup(
        adapter=adapter,
        method=method,
        budget=budget,
        seed=seed,
        emulate=emulate,
        renumber=renumber,
        timed=timed,
        sites=sites,
        decode_site=step_site,
        signals=signals,
        extra_blocks=extra,
        idle_blocks=idle,
        evicting=evicting,
        by_item=by_item,
    )
    of_decoder = set(adapter.decoder.modules())
    taps = [
        (module, active.as_selection(watcher, module in of_decoder)) for module, watcher in watchers
    ]
    return setup, AttentionTap([*taps, *_step_watchers(adapter, step_site, active)])


def _cache_watchers(
    adapter: ModelParts, evicting: CacheEvictor | None, active: ActivePass
) -> Sequence[tuple[nn.Module, Watcher]]:
    """Watch every decoder layer that holds the whole prompt, if cache entries will be evicted."""
    if evicting is None:
        return []
    return [
        (layer.self_attn, partial(active.watch_cache, number))
        for number, layer in enumerate(adapter.decoder.layers)
        if adapter.holds_prompt(number)
    ]


def _step_watchers(
    adapter: ModelParts, site: Site | None, active: ActivePass
) -> Sequence[tuple[nn.Module, Watcher]]:
    """Watch the layer below a decode site."""
    if site is None:
        return []
    return [(adapter.decoder.layers[site.layer - 1].self_attn, active.watch_step)]
