"""One call of `generate`: hooks that shorten the batch at the method's sites and keep what follows consistent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harness.engine.finite import FiniteLogits
from harness.engine.focus import Focus
from harness.engine.guards import require_one_beam
from harness.engine.idle import IdleBlocks
from harness.engine.layout import Layout, Stage, mix, take
from harness.engine.masks import prefill_mask, reference_mask
from harness.engine.positions import closed, rotary_at
from harness.engine.record import Generated, Record, answer_lengths
from harness.engine.reduce import (
    Decision,
    Rows,
    TokensOf,
    decide,
    hide,
    row_generators,
    shrink,
    write_merged,
)
from harness.engine.steps import Steps
from harness.engine.tower import TowerRun
from harness.measure.clock import Clock
from harness.measure.memory import kv_bytes
from harness.measure.schedule import shortened_layer
from harness.measure.work import Work
from methods.base import Site

if TYPE_CHECKING:
    from harness.engine.parts import Parts
    from harness.engine.session import Session

Arguments = dict[str, Any]


class Pass:
    """Carries a batch from the tower to the last decoding step.

    The tokens alive are described by a growing list of stages. A `vision` site decides on the features that entered the
    projector and takes effect, like a `prefix` site, on the input of layer 0, for every model alike: some call the
    projector once, some several times, some inside the tower. Features that it merges are projected once more. A
    `layer` site gathers the hidden states that enter its layer and hands all later layers the gathered rotary tables
    and a mask of the new length; where gaps are closed, tables of the new positions instead. Decoding steps need hooks
    only if some row is padded, if gaps were closed, or if the back end wants explicit masks; otherwise all hooks but
    the one that looks whether logits are finite are gone after the prefill.

    Args:
        session: method, model and settings.
        layout: of the batch.
        samples: one id for each row.
    """

    def __init__(self, session: Session, layout: Layout, samples: tuple[str, ...]) -> None:
        self._session = session
        self._layout = layout
        self._samples = samples
        self._decoder = session.adapter.decoder
        self.clock = Clock(*session.adapter.devices, enabled=session.timed)
        self._requested = tuple(
            session.budget.keep(session.method, session.adapter.facts, visual, text)
            if visual
            else (0,) * len(session.sites)
            for visual, text in zip(layout.counts, layout.text, strict=True)
        )
        self._sees_features = any(site.where == "vision" for site in session.sites)
        self._beams = 1
        self._stages: list[Stage] = []
        self._features: list[Tensor] = []
        self._reprojected = (0,) * layout.rows
        self._in_prefill = False
        #: Positions (..., L) of the prompt as the decoder was given them.
        self.positions: Tensor | None = None
        self._kept: list[tuple[int, ...]] = []
        self._spare: list[Tensor] = []
        self._cache_bytes = 0
        self._cache_lengths: tuple[int, ...] = ()
        self.tower = self._tower_run()
        self._idle = IdleBlocks(session.idle_blocks)
        #: Chooses what decoding steps attend to, once the prefill is over; None if nothing does.
        self.focus: Focus | None = None
        self._vision_handles: list[RemovableHandle] = []
        self._handles: list[RemovableHandle] = []

    # ------------------------------------------------------------------ life

    def _tower_run(self) -> TowerRun | None:
        """Return what runs the tower's blocks; None if nothing happens inside it."""
        session, sites = self._session, self._session.tower_sites
        number = len(sites)
        if all(
            count == visual
            for counts, visual in zip(self._requested, self._layout.counts, strict=True)
            for count in counts[:number]
        ):
            return None
        return TowerRun(
            method=session.method,
            sites=sites,
            blocks=session.adapter.tower_blocks(),
            extra=int(session.adapter.facts.class_attention == "token"),
            layout=self._layout,
            requested=self._requested,
            generator_of=lambda row, picture, site: row_generators(
                session.seed, [f"{self._samples[row]}/{picture}"], site
            )[0],
            emulate=session.emulate,
            clock=self.clock,
        )

    def __enter__(self) -> Pass:
        """Install the hooks of the prefill."""
        adapter = self._session.adapter
        self._idle.__enter__()
        if self.tower is not None:
            self.tower.__enter__()
        self._vision_handles = [
            adapter.tower.register_forward_pre_hook(self._before_tower),
            adapter.projector.register_forward_pre_hook(self._before_projector),
            adapter.projector.register_forward_hook(self._after_vision),
            *self._session.signals.hook_tower(self.clock),
        ]
        self._handles = [
            self._decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True),
            self._decoder.register_forward_hook(self._after_decoder),
        ]
        self._finite = FiniteLogits(adapter.model.get_output_embeddings())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove every hook, also after an error."""
        self._remove_hooks()
        self._finite.close()
        if self.tower is not None:
            self.tower.__exit__()
        self._idle.__exit__()

    def _remove_hooks(self) -> None:
        for handle in (*self._vision_handles, *self._handles):
            handle.remove()
        self._vision_handles.clear()
        self._handles.clear()

    def prefill_stage(self) -> Stage | None:
        """Return the stage in force while a prefill runs, None outside one."""
        return self._stages[-1] if self._in_prefill else None

    # ------------------------------------------------------------------ deciding

    def _decide(
        self, number: int, stage: Stage, tokens_of: TokensOf, merge_onto: TokensOf | None = None
    ) -> Decision:
        """Ask the method for its plans at site `number`, one for each row of the batch as it runs."""
        session = self._session
        keep = [counts[number] for counts in self._requested for _ in range(self._beams)]
        names = [name for name in self._samples for _ in range(self._beams)]
        with self.clock.phase("select"):
            return decide(
                method=session.method,
                site=session.sites[number],
                keep=keep,
                layout=self._layout.repeat(self._beams).on(stage.valid.device),
                stage=stage,
                signals=session.signals,
                generators=row_generators(session.seed, names, number),
                tokens_of=tokens_of,
                merge_onto=merge_onto,
            )

    def _advance(self, site: Site, decision: Decision) -> Tensor | None:
        """Enter the next stage; return the slots to gather, or None if nothing moves (all kept, or emulated)."""
        first, stage = effect(site), self._stages[-1]
        self._kept.append(decision.counts[:: self._beams])
        if decision.spare is not None:
            self._spare.append(decision.spare[:: self._beams])
        if decision.keeps_all(stage):
            return None
        if self._session.emulate:
            self._stages.append(hide(stage, decision, first))
            return None
        text = self._layout.repeat(self._beams).text
        following, index = shrink(stage, decision, text, first)
        self._stages.append(following)
        return index

    # ------------------------------------------------------------------ vision

    def _before_tower(self, module: nn.Module, args: Any) -> None:
        self.clock.start("vision")

    def _before_projector(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._sees_features:
            self._features.append(self._session.adapter.features(args[0]))

    def _after_vision(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clock.stop("vision")

    def _reduce_features(self, number: int, site: Site, kwargs: Arguments) -> Arguments:
        """Decide on tower features and take effect on the input of the decoder.

        A merged token is the projection of merged features. Where the model blends projected units into tokens
        (bilinear pooling), no features stand for one token: the blend is what the method sees and merging happens
        after the projector.
        """
        layout = self._layout.repeat(self._beams)
        # No picture in the whole batch, no features: then no row has tokens to mix.
        units = torch.cat(self._features) if self._features else torch.empty(0)

        def blended(rows: Rows, n: int) -> Tensor:
            share = None if layout.share is None else layout.share[rows][:, :n]
            return mix(units, layout.source[rows][:, :n], share)

        onto = self._tokens(kwargs["inputs_embeds"])
        decision = self._decide(number, self._stages[-1], blended, onto)
        if decision.merged:
            adapter = self._session.adapter
            parts = tuple(
                replace(part, values=_project(adapter, part.values)) if part.features else part
                for part in decision.merged
            )
            decision = replace(decision, merged=parts)
            counts = zip(decision.counts, layout.blended, strict=True)
            again = tuple(0 if mixed else count for count, mixed in counts)
            self._reprojected = again[:: self._beams]
        return self._shorten_input(kwargs, site, decision)

    # ------------------------------------------------------------------ decoder stack

    def _before_decoder(self, module: nn.Module, args: Any, kwargs: Arguments) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            return args, self._steps.arguments(kwargs)
        self.clock.start("prefill")
        self._in_prefill = True
        for handle in self._vision_handles:
            # Whatever goes through the projector from here on is the engine's own.
            handle.remove()
        self._beams = kwargs["inputs_embeds"].shape[0] // self._layout.rows
        if self._session.decode_site is not None:
            require_one_beam(self._beams)
        layout = self._layout.repeat(self._beams)
        self._session.signals.start(layout, kwargs["inputs_embeds"])
        self._stages = [Stage.initial(layout)]
        kwargs = self._follow_tower(kwargs)
        for number, site in enumerate(self._session.sites):
            if site.where == "tower":
                continue
            if site.where == "vision":
                kwargs = self._reduce_features(number, site, kwargs)
            elif effect(site) == 0:
                decision = self._decide(
                    number, self._stages[-1], self._tokens(kwargs["inputs_embeds"])
                )
                kwargs = self._shorten_input(kwargs, site, decision)
        self.positions = kwargs["position_ids"]
        self._install_layers()
        return args, kwargs

    def _follow_tower(self, kwargs: Arguments) -> Arguments:
        """Drop the tokens of the patches that went inside the tower."""
        sites, layout = self._session.tower_sites, self._layout
        if not sites:
            return kwargs
        whole = (torch.arange(count) for count in layout.counts)
        kept = list(whole) if self.tower is None else self.tower.kept()
        for number in range(len(sites) - 1):
            self._kept.append(tuple(counts[number] for counts in self._requested))
        index = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
        index = index.repeat_interleave(self._beams, 0).to(self._stages[-1].valid.device)
        counts = tuple(len(own) for own in kept for _ in range(self._beams))
        return self._shorten_input(kwargs, sites[-1], Decision(index, counts, ()))

    def _tokens(self, hidden: Tensor) -> TokensOf:
        """Return the function that gathers some rows' visual tokens out of (B, M, D) hidden states."""
        slots = self._stages[-1].move(hidden.device).slots
        return lambda rows, n: take(hidden[rows], slots[rows][:, :n], -2)

    def _install_layers(self) -> None:
        """Hook the decoder layers from the first that differs from the plain model."""
        layers = [effect(site) for site in self._session.sites if effect(site) > 0]
        if self._session.decode_site is not None:
            layers.append(self._session.decode_site.layer)
        if self._session.emulate and len(self._stages) > 1:
            layers.append(0)
        if not layers:
            return
        # Behind the last layer stands the final norm: whoever only looks may look there too.
        modules = [*self._decoder.layers, self._decoder.norm]
        last = max(len(self._decoder.layers), *(layer + 1 for layer in layers))
        for index in range(min(layers), last):
            hook = self._layer_hook(index)
            self._handles.append(modules[index].register_forward_pre_hook(hook, with_kwargs=True))

    def _shorten_input(self, kwargs: Arguments, site: Site, decision: Decision) -> Arguments:
        """Apply a decision that takes effect before layer 0 to the arguments of the decoder stack."""
        before = self._stages[-1]
        hidden = write_merged(kwargs["inputs_embeds"], before.slots, decision)
        index = self._advance(site, decision)
        stage = self._stages[-1]
        position_ids = kwargs["position_ids"]
        if self._session.renumber:
            position_ids = closed(stage.valid)
        elif index is not None:
            position_ids = _take_positions(position_ids, index)
        if index is not None:
            hidden = take(hidden, index, -2)
            # Never None: gaps in the positions without a mask would be read as packed sequences.
            kwargs = {**kwargs, "attention_mask": stage.valid}
        return {**kwargs, "inputs_embeds": hidden, "position_ids": position_ids}

    def _after_decoder(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._in_prefill:
            return
        self._in_prefill = False
        self.clock.stop("prefill")
        cache = output.past_key_values
        self._cache_bytes = kv_bytes(cache)
        self._cache_lengths = tuple(layer.keys.shape[-2] for layer in cache.layers)
        self.focus = self._focus_of_steps()
        config, emulate = self._decoder.config, self._session.emulate
        embedding = self._decoder.rotary_emb if self._session.renumber else None
        self._steps = Steps(self._stages, config, emulate, embedding, self.focus)
        if not self._steps.needed:
            self._remove_hooks()
        self.clock.start("decode")

    def _focus_of_steps(self) -> Focus | None:
        """Return what asks the method at each decoding step; None if it has no decode site."""
        site = self._session.decode_site
        if site is None:
            return None
        below = next(stage for stage in reversed(self._stages) if stage.first < site.layer)
        return Focus(self._session.method, site, self._layout, below)

    # ------------------------------------------------------------------ decoder layers

    def _layer_hook(self, layer: int) -> Any:
        numbered = [
            (number, site)
            for number, site in enumerate(self._session.sites)
            if effect(site) == layer > 0
        ]

        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: Arguments) -> Any:
            hidden = args[0]
            if not self._in_prefill:
                corrected = self._steps.layer_arguments(layer, hidden, kwargs)
                return None if corrected is None else (args, corrected)
            for number, site in numbered:
                rotary = kwargs.get("position_embeddings", ())  # the final norm takes none
                hidden = self._reduce_hidden(number, site, hidden, rotary)
            stage = self._stages[-1]
            if stage is self._stages[0]:
                return ((hidden, *args[1:]), kwargs) if numbered else None
            stage.move(hidden.device)
            if self._session.emulate and stage.mask is None:
                stage.mask = reference_mask(self._decoder.config, hidden, stage.valid, 0)
            if self._session.emulate:
                kwargs = {**kwargs, "attention_mask": stage.mask}
            elif stage.first > 0:
                kwargs = {**kwargs, "attention_mask": stage.mask, "position_ids": None}
            if stage.rotary is not None:
                kwargs = {**kwargs, "position_embeddings": stage.rotary}
            return (hidden, *args[1:]), kwargs

        return hook

    def _reduce_hidden(
        self, number: int, site: Site, hidden: Tensor, rotary: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the hidden states that enter a `layer` site's layer, and prepare the later ones."""
        before = self._stages[-1].move(hidden.device)
        with self.clock.phase("select"):
            self._session.signals.reach(
                self._session.sites[number], before, hidden, before.rotary or rotary
            )
        decision = self._decide(number, before, self._tokens(hidden))
        hidden = write_merged(hidden, before.slots, decision)
        index = self._advance(site, decision)
        stage = self._stages[-1]
        if index is not None:
            hidden = take(hidden, index, -2)
            stage.rotary = tuple(take(table, index, -2) for table in before.rotary or rotary)
            stage.mask = prefill_mask(self._decoder.config, hidden, stage.valid, stage.padded)
        if self._session.renumber and stage is not before:
            embedding = self._decoder.rotary_emb
            stage.rotary = rotary_at(embedding, hidden, closed(stage.valid))
        return hidden

    @property
    def needs_steps(self) -> bool:
        """Whether decoding steps are wrong without the pass, even for a caller who counts the positions."""
        return self._steps.masked or self._steps.staggered

    # ------------------------------------------------------------------ records

    def check_finite(self, lengths: Sequence[int]) -> None:
        """Check the logits behind the first `lengths` tokens of each row.

        Raises:
            NonFiniteLogits: they hold NaN or infinity.
        """
        self._finite.check(self._samples, lengths)

    def _work(self, row: int) -> Work:
        """Return what a row cost before the decoder."""
        work, extra = self._layout.work[row], len(self._session.extra_blocks)
        work = work._replace(
            reprojected=self._reprojected[row],
            extra_tokens=extra * work.tokens,
            extra_pairs=extra * work.pairs,
        )
        return work if self.tower is None else work.plus(self.tower.spared(row))

    def finish(self, ids: Tensor, logits: tuple[Tensor, ...] | None) -> Generated:
        """Close the clock and say what happened to each row. `ids` (B, T) are the new tokens.

        Raises:
            NonFiniteLogits: an answer was chosen by logits that hold NaN or infinity.
        """
        self.clock.stop("decode")
        totals, rows = self.clock.totals_ms(), self._layout.rows
        times = {
            name: totals.get(name, 0.0) / rows for name in ("vision", "select", "prefill", "decode")
        }
        times["decode_per_token"] = times["decode"] / max(ids.shape[1] - 1, 1)
        new_tokens = answer_lengths(ids, self._session.adapter.end_ids)
        self.check_finite(new_tokens)
        spare = _spare(self._spare, rows)
        attended = [None] * rows if self.focus is None else self.focus.means(new_tokens)
        depth, last = len(self._decoder.layers), self._stages[-1]
        records = []
        for row, sample in enumerate(self._samples):
            beam = row * self._beams
            entering = tuple(self._steps.stage(layer).counts[beam] for layer in range(depth))
            record = Record(
                sample=sample,
                visual=self._layout.counts[row],
                text=self._layout.text[row],
                special=self._layout.special[row],
                work=self._work(row),
                requested=self._requested[row],
                kept=tuple(kept[row] for kept in self._kept),
                entering=entering,
                kv_entries=sum(entering),
                kv_bytes=self._cache_bytes // (rows * self._beams),
                new_tokens=new_tokens[row],
                attended=attended[row],
                spare=spare[row],
                times_ms=times,
                origin=last.origin[beam, : last.counts[beam]].cpu(),
            )
            records.append(record)
        stacked = None if logits is None else torch.stack(logits, dim=1)
        return Generated(ids, tuple(records), stacked, self._cache_lengths)


def _project(adapter: Parts, features: Tensor) -> Tensor:
    """Project (b, k, D) features."""
    return adapter.project(features.flatten(0, 1)).view(*features.shape[:2], -1)


def _take_positions(positions: Tensor, index: Tensor) -> Tensor:
    """Gather (B, L) or, with several rotary axes, (axes, B, L) positions."""
    if positions.dim() == 2:
        return take(positions, index, -1)
    return torch.stack([take(axis, index, -1) for axis in positions])


def effect(site: Site) -> int:
    """Return the decoder layer whose input a site shortens: 0 for everything before the decoder."""
    return shortened_layer(site)


def _spare(sites: list[Tensor], rows: int) -> list[int | None]:
    """Return for each row the tokens that only fill up, over all sites; None if the method never says."""
    if not sites:
        return [None] * rows
    told: list[int] = torch.stack([site.cpu() for site in sites]).clamp(min=0).sum(0).tolist()
    return list(told)
