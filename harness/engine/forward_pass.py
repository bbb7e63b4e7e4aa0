"""One run of a prompt and its answer: the sites act in order, later layers and steps follow, and records result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from espalier.harness.cost.clock import Clock, DelayedTimes
from espalier.harness.cost.memory import kv_bytes
from espalier.harness.engine.attention_probe import Watcher
from espalier.harness.engine.decode_steps import DecodeStepMask, DecodeSteps, mean_entries
from espalier.harness.engine.engine_guards import require_one_beam
from espalier.harness.engine.finite_logits import FiniteLogits
from espalier.harness.engine.kv_cache import entries_of
from espalier.harness.engine.layer_inputs import check_order, held_entries, reference_mask
from espalier.harness.engine.layout import Layout, Stage, to_host
from espalier.harness.engine.model_parts import remove_hooks
from espalier.harness.engine.prefill import Prefill
from espalier.harness.engine.prompt import Prompt, VisionSide
from espalier.harness.engine.record import (
    GeneratedBatch,
    LoopOutput,
    SampleRecord,
    answer_lengths,
    rows_ended,
)
from espalier.harness.engine.session_setup import SessionSetup
from espalier.harness.engine.sites import (
    Arguments,
    BlockSites,
    LayerSites,
    PrefixSites,
    Sites,
    VisionSites,
    reads_features,
)
from espalier.methods.base import MethodError, Site, TokenReducer

if TYPE_CHECKING:
    from espalier.harness.engine.canvas_answers import CanvasHooks


def _tower() -> type[Sites]:
    # Only runs that act in the tower import what runs its blocks.
    from espalier.harness.engine.tower_sites import TowerSites

    return TowerSites


#: The kinds that shorten a prompt. Decode sites are not among them (`DecodeStepMask`).
KINDS: Mapping[str, Callable[[], type[Sites]]] = {
    "tower": _tower,
    "vision": lambda: VisionSites,
    "prefix": lambda: PrefixSites,
    "layer": lambda: LayerSites,
    "block": lambda: BlockSites,
}


def check_site_kinds(method: TokenReducer, sites: Sequence[Site]) -> None:
    """Refuse sites without an implementation.

    Raises:
        MethodError: names the first one.
    """
    for site in sites:
        if site.where not in KINDS:
            raise MethodError(
                f"{type(method).__name__} acts at a {site.where!r} site, which is not implemented; "
                f"valid: {', '.join(KINDS)}"
            )


def make_sites(prefill: Prefill) -> list[Sites]:
    """Return the sites of a pass in their order, consecutive ones of one kind together."""
    numbered = enumerate(prefill.setup.sites)
    return [
        KINDS[where]()(prefill, list(sites))
        for where, sites in groupby(numbered, key=lambda pair: pair[1].where)
    ]


PHASES = ("vision", "select", "prefill", "decode")


def sample_times(totals_ms: Mapping[str, float], rows: int, n_steps: int) -> dict[str, float]:
    """Return each sample's share of a batch's time, and the time of one step."""
    times = {name: totals_ms.get(name, 0.0) / rows for name in PHASES}
    times["decode_per_token"] = times["decode"] / max(n_steps, 1)
    return times


def make_records(
    prefill: Prefill,
    sites: Sequence[Sites],
    *,
    origin: Tensor,
    times_ms: Mapping[str, float],
    new_tokens: Sequence[int],
    ended: Sequence[bool],
    attended: Sequence[float | None],
    cache_bytes: int,
    spare: Tensor | None = None,
    shared: tuple[str, ...] = (),
    held: Sequence[Sequence[int]] | None = None,
    held_special: Sequence[Sequence[int]] | None = None,
    loop: str | None = None,
) -> tuple[SampleRecord, ...]:
    """Return a record for each sample of the batch.

    Args:
        prefill: the batch.
        sites: of the pass.
        origin: (rows, N) original indices of the visual tokens alive in the last layer.
        times_ms: of each sample.
        new_tokens: of each row.
        ended: of each row, as in `SampleRecord`.
        attended: of each row, as in `SampleRecord`.
        cache_bytes: of the whole cache after the prefill.
        spare: `Prefill.spares`.
        shared: phases that a stored prompt had completed.
        held: visual entries that each layer's cache holds, for each row; None: those that entered it.
        held_special: newline and separator entries that each layer's cache holds, for each row; None: all.
        loop: as in `SampleRecord`.
    """
    layout, beams, depth = prefill.layout, prefill.beams, len(prefill.setup.adapter.decoder.layers)
    spares = [None] * layout.rows if spare is None else spare.tolist()
    pairs = attended_pairs(prefill, prefill.stage_of, depth)
    full_pairs = attended_pairs(prefill, lambda _: prefill.stages[0], depth)
    holds_prompt, extra = prefill.setup.adapter.holds_prompt, len(prefill.setup.extra_blocks)
    partial = tuple(layer for layer in range(depth) if not holds_prompt(layer))
    records = []
    for row, sample in enumerate(prefill.samples):
        beam, work = row * beams, layout.work[row]
        work = work._replace(
            reprojected=prefill.reprojected[row],
            extra_tokens=extra * work.tokens,
            extra_pairs=extra * work.pairs,
        )
        for group in sites:
            work = work.plus(group.work(row))
        entering = tuple(prefill.stage_of(layer).counts[beam] for layer in range(depth))
        row_held = entering if held is None else tuple(layer[beam] for layer in held)
        row_special = tuple(layer[beam] for layer in held_special or ())
        record = SampleRecord(
            sample=sample,
            visual=layout.counts[row],
            text=layout.text[row],
            special=layout.special[row],
            work=work,
            requested=prefill.requested[row],
            kept=tuple(kept[row] for kept in prefill.kept),
            entering=entering,
            kv_entries=sum(row_held),
            held=None if held is None else row_held,
            held_special=row_special or None,
            kv_bytes=cache_bytes // (layout.rows * beams),
            new_tokens=new_tokens[row],
            ended=ended[row],
            attended=attended[row],
            sliding=partial or None,
            pairs=None if pairs is None else tuple(layer[beam] for layer in pairs),
            full_pairs=None if full_pairs is None else tuple(layer[beam] for layer in full_pairs),
            spare=spares[row],
            times_ms=times_ms,
            shared=shared,
            loop=loop,
            origin=origin[beam, : prefill.stage.counts[beam]],
            items=prefill.parts[row] if prefill.setup.by_item else None,
        )
        records.append(record)
    return tuple(records)


def attended_pairs(
    prefill: Prefill, stage_of: Callable[[int], Stage], depth: int
) -> list[tuple[int, ...]] | None:
    """Return the attended pairs of each layer and row; None for layers alike, where they follow from the counts."""
    types = prefill.setup.adapter.layer_types
    if types is None:
        return None
    count, first = cache(types.pairs), types.first_of_each()
    return [count(stage_of(layer), first[types.name(layer)]) for layer in range(depth)]


class Pass:
    """Runs a batch from the tower, or from a stored prompt, to the last decoding step.

    Sites are implemented in harness/engine/sites.py; a pass calls them before the model runs, at the input of the
    stack and before its layers. Decoding steps need hooks only if some row is padded, if gaps were closed, or if the
    back end needs explicit masks; otherwise the prefill removes all hooks except the check for finite logits. A
    denoising run is several passes over one prompt, each with its step number; they keep no cache, and end with the
    decoder stack.

    Args:
        setup: method, model and settings.
        layout: of the batch.
        samples: one id for each row.
        prompt: to start from; None: the model starts from pixels.
        step: number of the denoising step.
    """

    def __init__(
        self,
        setup: SessionSetup,
        layout: Layout,
        samples: tuple[str, ...],
        prompt: Prompt | None = None,
        step: int = 0,
    ) -> None:
        self._setup = setup
        self._decoder = setup.adapter.decoder
        self._prompt = prompt
        self.prefill = Prefill(setup, layout, samples, step)
        self.sites = make_sites(self.prefill)
        self._vision = VisionSide(setup, self.clock, reads_features(setup.sites))
        #: Decoder layers before which sites act.
        self._acting = frozenset(layer for group in self.sites for layer in group.layers())
        evicting, depth = setup.evicting, len(self._decoder.layers)
        self.eviction = None if evicting is None else evicting.begin(self.prefill, depth)
        #: Of the answer, once the prefill is over.
        self.steps: DecodeSteps
        #: Answers on canvases; None: token by token, or by denoising steps.
        self.canvas: CanvasHooks | None = None
        if setup.adapter.canvas is not None:
            # Only models with a canvas import what runs it.
            from espalier.harness.engine.canvas_answers import CanvasHooks

            self.canvas = CanvasHooks(setup.adapter, lambda: self.steps)
        self._finite: FiniteLogits
        #: Positions (..., L) of the prompt as passed to the decoder.
        self.positions: Tensor | None = None
        self._cache_bytes = 0
        self._cache_lengths: tuple[int, ...] = ()
        #: Visual entries of each layer and row after the prefill, where caches do not hold all that entered.
        self._held: Sequence[Sequence[int]] | None = None
        #: Chooses the entries that decoding steps attend to, after the prefill; None without a decode site.
        self.step_mask: DecodeStepMask | None = None
        #: Positions (..., B, 1) of the next token, before gaps are closed.
        self.following: Tensor
        #: Whether the loop's steps come without masks, so that the pass adds them.
        self.completes = False
        self._entry: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []
        self._open = ExitStack()

    @property
    def clock(self) -> Clock:
        """Times the phases of the batch."""
        return self.prefill.clock

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Pass:
        """Install the hooks of the prefill."""
        with ExitStack() as opening:
            opening.callback(remove_hooks, self._entry)
            opening.callback(remove_hooks, self._handles)
            if self._prompt is None:
                opening.enter_context(self._vision)
            for sites in self.sites:
                opening.callback(sites.close)
                sites.open()
            self._entry += [
                self._decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
                self._decoder.register_forward_hook(self._after_decoder),
            ]
            head = self._setup.adapter.model.get_output_embeddings()
            self._finite = FiniteLogits(head, all_places=self.canvas is not None)
            opening.callback(self._finite.close)
            if self.canvas is not None:
                opening.enter_context(self.canvas.installed())
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Remove every hook, also after an error; a condition that did not hold before it comes first."""
        self._open.close()
        if kind is not None and issubclass(kind, Exception):
            self._setup.conditions.settle()

    # ------------------------------------------------------------------ the prompt

    def _before_decoder(self, module: nn.Module, args: Any, kwargs: Arguments) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            return args, self.steps.arguments(kwargs)
        axes, rows = self._setup.adapter.facts.rotary_axes, kwargs["position_ids"].shape[-2]
        if axes > 1:  # outside every timed phase
            layout = self.prefill.layout
            check_order(kwargs["position_ids"], layout.repeat(rows // layout.rows), axes)
        self.clock.start("prefill")
        self._vision.stop_watching()
        features = self._vision.features()
        if self._prompt is not None:
            kwargs, features = self._prompt.enter(kwargs), self._prompt.features
        self.following = kwargs["position_ids"][..., -1:] + 1
        kwargs = self.prefill.start(kwargs)
        if self._setup.decode_site is not None:
            require_one_beam(self.prefill.beams)
        for sites in self.sites:
            kwargs = sites.enter(kwargs, features)
        self.positions = kwargs["position_ids"]
        self._handles += self._hook_layers()
        return args, kwargs

    def _after_decoder(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.prefill.running:
            return
        self.prefill.running = False
        self.clock.stop("prefill")
        cache = output.past_key_values
        if cache is None:
            return
        stages, config, setup = self.prefill.stages, self._decoder.config, self._setup
        text = setup.adapter.facts.text
        # Counted before eviction, which may store a copy for each query head.
        shards = text.kv_heads // cache.layers[text.full_layers[0]].keys.shape[1]
        if self.eviction is not None:
            with self.clock.phase("select"):
                stages = [*stages, *self.eviction.shorten(cache)]
        # States of linear attention are whole in every process.
        shared = kv_bytes([cache.layers[layer] for layer in text.full_layers])
        self._cache_bytes = kv_bytes(cache) + max(shards - 1, 0) * shared
        self._cache_lengths = tuple(map(entries_of, cache.layers))
        if (site := setup.decode_site) is not None:
            below = next(
                stage for stage in reversed(self.prefill.stages) if stage.first < site.layer
            )
            self.step_mask = DecodeStepMask(setup.method, site, self.prefill.layout, below)
        embedding = self._decoder.rotary_emb if setup.renumber else None
        types = setup.adapter.layer_types
        if self.eviction is not None:
            self._held = self.eviction.held_visual
        elif types is not None or text.linear is not None:
            layers = [self.prefill.stage_of(layer) for layer in range(len(self._cache_lengths))]
            counts = list(map(held_entries, layers, self._cache_lengths))
            self._held = None if counts == [stage.counts for stage in layers] else counts
        step_types = types if types is not None and types.steps_differ else None
        self.steps = DecodeSteps(
            stages, config, setup.emulate, embedding, self.step_mask, step_types, text
        )
        if not self.steps.needed:
            remove_hooks(self._handles)
            if not self.completes:
                remove_hooks(self._entry)
        self.clock.start("decode")

    # ------------------------------------------------------------------ the layers

    def _hook_layers(self) -> list[RemovableHandle]:
        """Hook the decoder layers from the first that differs from the plain model."""
        prefill, setup = self.prefill, self._setup
        decoder, handles = setup.adapter.decoder, []
        if prefill.deepstack is not None:
            handles += prefill.deepstack.hook(decoder.layers, prefill.active_stage)
        layers = [*self._acting]
        if setup.decode_site is not None:
            layers.append(setup.decode_site.layer)
        if setup.evicting is not None or (setup.emulate and prefill.shortened):
            layers.append(0)
        if not layers:
            return handles
        # The final norm follows the last layer; sites that only read may act before it.
        modules = [*decoder.layers, decoder.norm]
        last = max(len(decoder.layers), *(layer + 1 for layer in layers))
        return handles + [
            modules[layer].register_forward_pre_hook(
                partial(self._before_layer, layer), with_kwargs=True
            )
            for layer in range(min(layers), last)
        ]

    def _before_layer(
        self, layer: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments
    ) -> Any:
        hidden = args[0]
        if not self.prefill.running:
            corrected = self.steps.layer_arguments(layer, hidden, kwargs)
            return None if corrected is None else (args, corrected)
        acts = layer in self._acting
        if acts:
            # The library moves a layer's arguments to its card after this hook; the final norm takes no tables.
            tables = kwargs.get("position_embeddings", ())
            rotary = tuple(table.to(hidden.device) for table in tables)
            for sites in self.sites:
                hidden = sites.reach(layer, hidden, rotary)
        if not self.prefill.shortened:
            return ((hidden, *args[1:]), kwargs) if acts else None
        return (hidden, *args[1:]), self._stage_arguments(layer, hidden, kwargs)

    def _stage_arguments(self, layer: int, hidden: Tensor, kwargs: Arguments) -> Arguments:
        """Return a layer's arguments with the tables and the mask of the current stage."""
        setup = self._setup
        stage = self.prefill.stage.move(hidden.device)
        if (types := setup.adapter.layer_types) is not None:
            if "position_embeddings" not in kwargs:  # the final norm takes none
                return kwargs
            return {**kwargs, **types.arguments(stage, layer, hidden), "position_ids": None}
        if setup.emulate:
            if stage.mask is None:
                stage.mask = reference_mask(setup.adapter.decoder.config, hidden, stage.valid, 0)
            kwargs = {**kwargs, "attention_mask": stage.mask}
        elif stage.first > 0:
            mask = stage.mask
            if setup.adapter.facts.text.is_linear(layer):
                mask = stage.valid if stage.padded else None
            kwargs = {**kwargs, "attention_mask": mask, "position_ids": None}
        if stage.rotary is not None:
            kwargs = {**kwargs, "position_embeddings": stage.rotary}
        return kwargs

    # ------------------------------------------------------------------ the answer

    def check_finite(self) -> None:
        """Check the logits of the prompt.

        Raises:
            MethodError: a condition of the method does not hold.
            NonFiniteLogits: they contain NaN or infinity.
        """
        rows, flags = self.prefill.layout.rows, self._finite.flags(self.prefill.layout.rows)
        conditions = self._setup.conditions
        flags, holding = to_host(flags, conditions.flags(flags.device))
        conditions.check(holding.tolist())
        self._finite.check(self.prefill.samples, [1] * rows, flags)

    def step_records(self) -> tuple[SampleRecord, ...]:
        """Return each row's record of a denoising step, or of the run of a prompt before all steps.

        Kept indices stay on the device, so that a step need not wait for it.
        The caller counts the time of steps. A step caches nothing.
        """
        rows, has_cache = self.prefill.layout.rows, bool(self._cache_lengths)
        clock = self.clock  # alone: the times outlive the pass
        return make_records(
            self.prefill,
            self.sites,
            origin=self.prefill.stage.origin,
            times_ms=DelayedTimes(lambda: sample_times(clock.totals_ms(), rows, 1)),
            new_tokens=[0] * rows,
            ended=[False] * rows,
            attended=[None] * rows,
            cache_bytes=self._cache_bytes,
            spare=self.prefill.spares(),
            shared=("vision",),
            held=None if has_cache else [[0] * rows] * len(self._decoder.layers),
        )

    def finish(self, output: LoopOutput) -> GeneratedBatch:
        """Stop the clock and return the answers, with ids on the host, and each row's record.

        Raises:
            MethodError: a condition of the method does not hold.
            NonFiniteLogits: a token was chosen from logits that contain NaN or infinity.
            RuntimeError: sampling from invalid probabilities, although the model's logits are finite.

        Cost: one transfer to the host.
        """
        self.clock.stop("decode")
        rows, ends = self.prefill.layout.rows, self._setup.adapter.end_ids
        conditions, step_mask, spare = self._setup.conditions, self.step_mask, self.prefill.spares()
        nothing, steps = output.ids.new_zeros(0), [] if step_mask is None else step_mask.counts
        ids, end, undrawn, non_finite, origin, holding, spares, entries = to_host(
            output.ids,
            output.ids.new_full((), output.ids.shape[1]) if output.end is None else output.end,
            output.ids.new_zeros(()) if output.undrawn is None else output.undrawn,
            self._finite.flags(rows),
            self.prefill.stage.origin,
            conditions.flags(output.ids.device),
            nothing if spare is None else spare,
            torch.stack(steps) if steps else nothing,
        )
        conditions.check(holding.tolist())
        ids = ids[:, : int(end)]
        new_tokens = answer_lengths(ids, ends)
        checked = [int(end)] * rows if bool(undrawn) else new_tokens
        self._finite.check(self.prefill.samples, checked, non_finite)
        if bool(undrawn):
            raise RuntimeError("no token can be drawn: the processors left none with a probability")
        records = make_records(
            self.prefill,
            self.sites,
            origin=origin,
            times_ms=sample_times(self.clock.totals_ms(), rows, output.steps),
            new_tokens=new_tokens,
            ended=rows_ended(ids, ends),
            attended=[None] * rows if step_mask is None else mean_entries(entries, new_tokens),
            cache_bytes=self._cache_bytes,
            spare=None if spare is None else spares,
            shared=() if self._prompt is None else ("vision",),
            held=self._held,
            held_special=None if self.eviction is None else self.eviction.held_special,
            loop=output.loop,
        )
        records = records if self.canvas is None else self.canvas.completed(records)
        # The library's loops return logits of all steps, also of those after the longest answer of the beams.
        stop = None if output.end is None else int(end)
        stacked = None if output.logits is None else torch.stack(output.logits[:stop], dim=1)
        return GeneratedBatch(ids, records, stacked, self._cache_lengths)


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
            with self._pass.prefill.setup.conditions.collecting():
                self._pass.step_mask.choose(query, key, scaling)
