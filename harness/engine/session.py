"""The session: installs one method on one model for the length of a `with` block, and always restores the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from harness.artifacts.priors import Prior
from harness.budget import Budget
from harness.engine.finite import NonFiniteLogits, watched_origin
from harness.engine.focus import decode_site
from harness.engine.guards import check_generation, check_text_config
from harness.engine.idle import split_unread
from harness.engine.layout import Layout
from harness.engine.parts import Parts
from harness.engine.passes import Pass
from harness.engine.positions import closes_gaps
from harness.engine.probe import AttentionTap, Watcher
from harness.engine.record import Generated
from harness.engine.signals import Signals
from harness.engine.tower import HEADS
from harness.errors import UserError
from harness.specs import Backend, PositionPolicy
from methods.base import MethodError, TokenReducer


@dataclass(frozen=True)
class Prefilled:
    """A prompt that has been run: `logits` (V,) behind it, the `next` position (..., 1), and how its record is closed.

    Logits and position are on the device that inputs go to.

    `finish` takes the answer's ids (1, T) when decoding is over, and counts the time since the prefill as decoding.
    """

    logits: Tensor
    next: Tensor
    finish: Callable[[Tensor], Generated]


class Session:
    """Runs `generate` with visual tokens reduced by a method.

    `backend="drop"` removes tokens physically: hidden states, rotary tables, masks and cache all get shorter.
    `backend="emulate"` is the slow reference: the full sequence runs everywhere and explicit masks hide what was
    dropped. Both make the same choices; tests hold them against each other.

    Args:
        adapter: the model.
        method: the reducer; a method without sites leaves the model alone.
        budget: rule and ratio.
        seed: run seed, from which every sample's generator is derived.
        backend: `drop` or `emulate`.
        positions: `original` keeps the position ids of kept tokens, `renumbered` closes the gaps after every site,
            `method` does what the method's released code does.
        prior: calibrated prior, for methods that need one.
        timed: whether phases are timed (the device is synchronised at both ends of each).

    Raises:
        MethodError: the model cannot carry the method.
        UserError: the model's attention or layers are not supported.
    """

    def __init__(
        self,
        adapter: Parts,
        method: TokenReducer,
        budget: Budget,
        *,
        seed: int = 0,
        backend: Backend = "drop",
        positions: PositionPolicy = "original",
        prior: Prior | None = None,
        timed: bool = True,
    ) -> None:
        if not method.in_one_prefill:
            raise MethodError(
                f"{type(method).__name__} is not a token reducer; sessions carry token reducers only"
            )
        check_text_config(adapter.decoder.config)
        self.adapter = adapter
        self.method = method
        self.budget = budget
        self.seed = seed
        self.emulate = backend == "emulate"
        self.timed = timed
        depth = adapter.facts.text.layers
        self.sites = method.all_sites(adapter.facts.tower.layers, depth)
        self.tower_sites = tuple(site for site in self.sites if site.where == "tower")
        self.decode_site = decode_site(method, depth)
        self.renumber = closes_gaps(positions, method, adapter.facts)
        self._pass: Pass | None = None
        self.signals = Signals(
            adapter,
            method,
            self.sites,
            prior,
            stage=lambda: self._pass.prefill_stage() if self._pass else None,
        )
        watchers = [*self.signals.watchers(), *self._tower_watchers()]
        looked_at = [*(module for module, _ in watchers), *self.signals.watched_layers]
        #: Blocks of the tower that the projector does not read: those that a method looks at, and those that idle.
        self.extra_blocks, self.idle_blocks = split_unread(adapter.unread_blocks(), looked_at)
        taps = [(module, self._as_selection(watcher)) for module, watcher in watchers]
        self._tap = AttentionTap([*taps, *self._step_watchers()])
        self._open = False

    def _tower_watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Watch the tower's blocks if a method inside it reads their queries or keys.

        Raises:
            UserError: the model has no such blocks, or its kernel takes no bias for sizes.
        """
        if not self.tower_sites:
            return []
        blocks = self.adapter.tower_blocks()
        kernel = blocks[0].kernel
        if self.method.proportional and kernel.startswith("flash"):
            raise UserError(
                f"model.attention={kernel!r} takes no bias for sizes (proportional attention); valid: sdpa"
            )
        read = {need.signal for site in self.tower_sites for need in self.method.needs(site)}
        if not read & HEADS:
            return []

        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            if self._pass is not None and self._pass.tower is not None:
                self._pass.tower.watch(query, key, scaling)

        last = self.tower_sites[-1].layer
        return [(block.attention, watch) for block in blocks[: last + 1]]

    def _step_watchers(self) -> list[tuple[nn.Module, Watcher]]:
        """Watch the layer below a decode site; this counts as decoding, not as selection."""
        if self.decode_site is None:
            return []

        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            if self._pass is not None and self._pass.focus is not None:
                self._pass.focus.look(query, key, scaling)

        below = self.adapter.decoder.layers[self.decode_site.layer - 1]
        return [(below.self_attn, watch)]

    def _as_selection(self, watcher: Watcher) -> Watcher:
        """Count a watcher's work as selection, and let it see nothing outside `generate`."""

        def watch(query: Tensor, key: Tensor, scaling: float) -> None:
            if self._pass is not None:
                with self._pass.clock.phase("select"):
                    watcher(query, key, scaling)

        return watch

    def __enter__(self) -> Session:
        """Wrap the attention functions that the method's signals need."""
        self._tap.__enter__()
        self._open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the model."""
        self._open = False
        self._tap.__exit__(kind, error, trace)

    @torch.inference_mode()
    def generate(
        self, inputs: Mapping[str, Any], samples: Sequence[str] | None = None, **generation: Any
    ) -> Generated:
        """Generate answers for one left-padded batch.

        Args:
            inputs: what the adapter's `encode` returned.
            samples: one unique id for each row; they seed the rows' generators.
            **generation: arguments of transformers' `generate`.

        Raises:
            UserError: an argument that the engine cannot honour.
            PlanError: the method broke its contract.
            NonFiniteLogits: the model's logits hold NaN or infinity; the first module that put them out is named.
        """
        if not self._open:
            raise RuntimeError("Session.generate was called outside its `with` block")
        check_generation({**inputs, **generation})
        layout = self.adapter.layout(inputs)
        names = tuple(samples) if samples is not None else tuple(map(str, range(layout.rows)))
        if len(names) != layout.rows:
            raise ValueError(f"{len(names)} sample ids for {layout.rows} rows")
        try:
            return self._generate(inputs, layout, names, generation)
        except NonFiniteLogits as error:
            short = {**generation, "max_new_tokens": 1, "min_new_tokens": None}
            error.origin = self._origin(lambda: self._generate(inputs, layout, names, short))
            raise

    def _generate(
        self,
        inputs: Mapping[str, Any],
        layout: Layout,
        names: tuple[str, ...],
        generation: Mapping[str, Any],
    ) -> Generated:
        self.signals.begin(inputs)
        try:
            with Pass(self, layout, names) as self._pass:
                output = self.adapter.model.generate(
                    **inputs, **generation, return_dict_in_generate=True
                )
                ids = output.sequences[:, inputs["input_ids"].shape[1] :]
                return self._pass.finish(ids, getattr(output, "logits", None))
        finally:
            self._pass = None

    def _origin(self, prefill: Callable[[], object]) -> str:
        """Run a prefill once more and say which module first put out values that are not finite."""
        with watched_origin(self.adapter) as found, suppress(NonFiniteLogits):
            prefill()
        return f"they began in {found[0]}" if found else "every layer of the prefill is finite"

    @torch.inference_mode()
    def prefill(
        self, inputs: Mapping[str, Any], cache: Cache, sample: str = "0"
    ) -> tuple[Tensor, Tensor]:
        """Run one prompt into `cache`, for a decoding loop of the caller's own.

        Returns:
            logits: (V,) behind the last token of the prompt.
            next: (..., 1) position of the token that follows, on as many axes as the decoder takes.

        Raises:
            ValueError: several prompts, whose padding steps of one's own would have to mask.
            RuntimeError: outside the `with` block, or the method chooses anew at each decoding step.
        """
        done = self.prefilled(inputs, cache, sample)
        return done.logits, done.next

    @torch.inference_mode()
    def prefilled(self, inputs: Mapping[str, Any], cache: Cache, sample: str = "0") -> Prefilled:
        """Do what `prefill` does, and keep what the record of the sample needs.

        Raises:
            NonFiniteLogits: the logits hold NaN or infinity; the first module that put them out is named.
        """
        if not self._open:
            raise RuntimeError("Session.prefill was called outside its `with` block")
        layout = self.adapter.layout(inputs)
        if layout.rows != 1:
            raise ValueError(f"{layout.rows} prompts; a prefill by itself takes one")
        try:
            return self._prefilled(inputs, layout, cache, sample)
        except NonFiniteLogits as error:
            error.origin = self._origin(
                lambda: self._prefilled(inputs, layout, DynamicCache(), sample)
            )
            raise

    def _prefilled(
        self, inputs: Mapping[str, Any], layout: Layout, cache: Cache, sample: str
    ) -> Prefilled:
        self.signals.begin(inputs)
        arguments = {**inputs, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        if (
            self.adapter.facts.rotary_axes == 1
        ):  # with more, the model derives them from the pictures
            arguments["position_ids"] = inputs["attention_mask"].long().cumsum(1) - 1
        try:
            with Pass(self, layout, (sample,)) as this:
                self._pass = this
                output = self.adapter.model(**arguments)
                if this.needs_steps:
                    raise RuntimeError("this method or backend needs the engine in every step")
                this.check_finite((1,))
        finally:
            self._pass = None
        assert this.positions is not None  # the decoder has run
        # Wherever a spread model ends, what goes on from here begins on its first device.
        following = this.positions.amax().to(self.adapter.device) + 1
        return Prefilled(
            logits=output.logits[0, -1].to(self.adapter.device),
            next=following.expand(*this.positions.shape[:-1], 1),
            finish=lambda ids: this.finish(ids, None),
        )
