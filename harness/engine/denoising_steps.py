"""Denoising steps: prompt and answer run through the decoder stack together, or the answer after a cached prompt.

A method may merge entries of the cached prompt in a step, in the layers after the one where its deciders score them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock, DelayedTimes
from espalier.harness.engine.attention_probe import AttentionTap, attention_rows
from espalier.harness.engine.cached_steps import (
    CachedPrompt,
    EntryChoice,
    PlacedEntries,
    StepEntries,
    StoredSequence,
    cache_prompt,
    recorded_changes,
    run_answer,
    run_stack,
    run_window,
)
from espalier.harness.engine.kv_cache import IndexedCache, MergedLayer
from espalier.harness.engine.layer_inputs import rotate, unrotate
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.session import Session
from espalier.harness.engine.session_setup import SessionSetup
from espalier.harness.engine.signals.producer import DECIDERS, FIRST_KEPT, STEP
from espalier.methods.base import Plan
from espalier.methods.blame import Blame
from espalier.methods.denoiser import DenoisingReducer, as_denoiser
from espalier.methods.plans import require_tensor
from espalier.methods.select.entries import Entries, EntryStore, KeptEntries, PromptEntries
from espalier.methods.select.topk import indices_of, rows_of


class EntryMerger:
    """One step's choice, and the layers that follow from it. The prompt's cache is only read.

    A step that keeps the last choice, as the method's `every` states, attends to what was merged by it.

    Args:
        setup: of the session.
        method: of the session; it merges entries.
        cached_prompt: the prompt.
        answer: with the step's deciders.
        keep: visual tokens that stay, for each row.
    """

    def __init__(
        self,
        setup: SessionSetup,
        method: DenoisingReducer,
        cached_prompt: CachedPrompt,
        answer: AnswerState,
        keep: tuple[int, ...],
    ) -> None:
        self._setup, self._prompt, self._answer = setup, cached_prompt, answer
        self._clock = Clock(*setup.adapter.devices, enabled=setup.timed)
        self._method, self._keep = method, keep
        #: First layer with merged entries.
        self.first_merged = setup.sites[0].layer + 1
        (self._prompt_stage,) = cached_prompt.stages
        #: Whether every token of every row stays.
        self.idle = keep == self._prompt_stage.counts
        self._lengths = [n + text for n, text in zip(keep, cached_prompt.layout.text, strict=True)]
        choice = cached_prompt.choice
        if choice is None or choice.keep != keep or (answer.step - 1) % method.every == 0:
            choice = cached_prompt.choice = EntryChoice(keep, self._stages())
        #: The last choice, made once the deciders' layer has run, and whether that was in an earlier step.
        self.choice, self.holds = choice, bool(choice.kept)
        self._choices: dict[tuple[int, torch.device], PlacedEntries] = {}

    def _stages(self) -> tuple[Stage, Stage]:
        """Return the stages up to the deciders' layer and after it; the second without slots."""
        prompt_stage, width = self._prompt_stage, max(self._lengths)
        places = torch.arange(width, device=prompt_stage.valid.device)
        valid = torch.stack([places < length for length in self._lengths])
        empty = prompt_stage.slots[:, :0]
        return prompt_stage, Stage(
            self.first_merged, valid, min(self._lengths) < width, empty, self._keep, empty, empty
        )

    def cache(self) -> Cache:
        """Return the cache of this step: the prompt's layers, then merged ones."""
        prompt_layers = self._prompt.cache.indexed
        merged = [
            MergedLayer(partial(self._layer_entries, number))
            for number in range(self.first_merged, len(prompt_layers))
        ]
        return Cache(layers=[*prompt_layers[: self.first_merged], *merged])

    def records(self) -> tuple[SampleRecord, ...]:
        """Return each row's record of the step."""
        rows, clock = len(self._keep), self._clock  # not this step, which the times outlive
        times = DelayedTimes(lambda: {"select": clock.totals_ms().get("select", 0.0) / rows})
        n_merged = len(self._prompt.cache.indexed) - self.first_merged
        return tuple(
            replace(
                record,
                requested=(keep,),
                kept=(keep,),
                entering=record.entering[: self.first_merged] + (keep,) * n_merged,
                held=record.entering,
                origin=record.origin if self.idle else self.choice.kept[row],
                times_ms=times,
            )
            for row, (record, keep) in enumerate(zip(self._prompt.records, self._keep, strict=True))
        )

    def choose(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Choose in every row by the attention of its deciders."""
        with self._clock.phase("select"):
            stage = self._prompt_stage.move(query.device)
            deciders = self._answer.deciders.to(query.device)
            alive = torch.cat([stage.valid, stage.valid.new_ones(deciders.shape)], 1)
            places = indices_of(deciders, self._answer.most_deciders or deciders.shape[1])
            queries = query.transpose(1, 2)[rows_of(places), places].transpose(1, 2)
            rows = attention_rows(queries, key, scaling, alive[:, None, None, :])
            attention = (rows * deciders.gather(1, places).unsqueeze(2)).sum(1)
            for row, (count, keep) in enumerate(zip(stage.counts, self._keep, strict=True)):
                scores = attention[row : row + 1, stage.slots[row, :count]]
                self.choice.kept.append(
                    self._chosen(scores, keep) if count else stage.slots[row, :0]
                )

    def _chosen(self, scores: Tensor, keep: int) -> Tensor:
        with Blame(self._method, "chosen", self._setup.sites[0]):
            chosen = self._method.chosen(scores, keep)
            require_tensor("what `chosen` returns", chosen, (1, keep), scores.device)
            # Reading the device in every step would make it wait.
            if not self._prompt.prepared:
                Plan(chosen).check(scores.shape[1], keep)
        return chosen[0]

    def _layer_entries(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H_kv, S' + G, D) of a layer, those of the answer last."""
        width, count = max(self._lengths), keys.shape[2]
        entries = self._prompt.merged.get(number)
        if entries is None or entries.keys.shape[2] < width + count:
            stores = [x.new_zeros(*x.shape[:2], width + count, x.shape[3]) for x in (keys, values)]
            entries = self._prompt.merged[number] = StepEntries(stores[0], stores[1])
        if not self.holds:
            with self._clock.phase("select"):
                self._merge_rows(number, entries)
        for store, states in ((entries.keys, keys), (entries.values, values)):
            store[:, :, width : width + count] = states
        return entries.keys[:, :, : width + count], entries.values[:, :, : width + count]

    def _merge_rows(self, number: int, entries: StepEntries) -> None:
        """Write each row's entries of a layer."""
        for row, (length, keep) in enumerate(zip(self._lengths, self._keep, strict=True)):
            n_visual = self._prompt_stage.counts[row]
            stored = self._prompt.cache.indexed[number].entries
            start = stored[0].shape[2] - length - n_visual + keep
            stored_keys, stored_values = (store[row, :, start:] for store in stored)
            if keep < n_visual:
                self._merge_row(number, row, entries, stored_keys, stored_values)
            else:
                entries.fixed.discard(row)
                entries.keys[row, :, :length] = stored_keys
                entries.values[row, :, :length] = stored_values

    def _merge_row(
        self, number: int, row: int, entries: StepEntries, keys: Tensor, values: Tensor
    ) -> None:
        """Write one row's merged entries, after those of its other tokens unless all are merged into."""
        dtype = torch.promote_types(keys.dtype, torch.float32)
        placed = self._placed(row, keys, dtype)
        choice, length = placed.choice, self._lengths[row]
        prompt = self._prompt.prepared.get((number, row))
        if prompt is None:
            # A copy: the cache itself is never written.
            unrotated = unrotate(keys.to(dtype), *placed.tables)
            stores = [
                EntryStore(store.transpose(0, 1).clone(memory_format=torch.contiguous_format))
                for store in (unrotated, values.to(dtype))
            ]
            prompt = self._prompt.prepared[number, row] = PromptEntries(*stores)
        with Blame(self._method, "merged", self._setup.sites[0]):
            merged_keys, merged_values = self._method.merged(Entries(prompt, choice))
            has_all = isinstance(merged_keys, Tensor) and merged_keys.shape[1:2] == (length,)
            shape = (keys.shape[0], length if has_all else self._keep[row], keys.shape[2])
            require_tensor("keys that `merged` returns", merged_keys, shape, keys.device, True)
            require_tensor("values that `merged` returns", merged_values, shape, keys.device, True)
        first = 0 if has_all else length - self._keep[row]
        if has_all:
            entries.fixed.discard(row)
        elif self._setup.renumber:
            turned = prompt.keys.rows[choice.non_visual].transpose(0, 1)
            rotate(turned, *placed.non_visual, entries.keys[row, :, :first])
            entries.values[row, :, :first] = values[:, choice.non_visual]
        elif row not in entries.fixed:
            entries.fixed.add(row)
            entries.keys[row, :, :first] = keys[:, choice.non_visual]
            entries.values[row, :, :first] = values[:, choice.non_visual]
        tables = placed.staying if has_all else placed.visual
        rotate(merged_keys, *tables, entries.keys[row, :, first:length])
        entries.values[row, :, first:length] = merged_values

    def _placed(self, row: int, keys: Tensor, dtype: torch.dtype) -> PlacedEntries:
        """Return the kept entries of a row, counted from its first; the same in every layer of a device."""
        key = (row, keys.device)
        if key not in self._choices:
            stage, count = self._prompt_stage, keys.shape[1]
            cos, sin = self._prompt.rotary(self._setup, keys, dtype)
            tables = cos[row, -count:], sin[row, -count:]
            start = stage.valid.shape[1] - count
            visual = stage.slots[row, : stage.counts[row]].to(keys.device) - start
            choice = KeptEntries(visual, self.choice.kept[row].to(keys.device), count)
            self._choices[key] = PlacedEntries(choice, tables, self._setup.renumber)
        return self._choices[key]


class DenoisingSession(Session):
    """Runs single steps of a denoising model, with visual tokens reduced again in each.

    Arguments are those of `Session`; its budget is used for steps without one.
    """

    steps: ClassVar[bool] = True

    @torch.inference_mode()
    def denoise(
        self, prompt: Prompt, answer: AnswerState, samples: Sequence[str], budget: Budget
    ) -> tuple[Tensor, tuple[SampleRecord, ...]]:
        """Run one step over the whole sequence; every token sees every other.

        Args:
            prompt: of the batch, as `prompt` made it.
            answer: its current state.
            samples: one id for each row.
            budget: of this step.

        Returns:
            The logits (B, M, V) of the positions that need them, not checked, and each row's record.

        Raises:
            BudgetError: the budget cannot be met.
            RuntimeError: outside the `with` block.
        """
        states, records, _ = self._whole(prompt, answer, samples, budget)
        return self._logits(answer.choose(states)), records

    @torch.inference_mode()
    def store(
        self,
        prompt: Prompt,
        answer: AnswerState,
        samples: Sequence[str],
        budget: Budget,
        window: range,
        recording: bool = False,
    ) -> StoredSequence:
        """Run one step over the whole sequence as `denoise` does, and store it for steps of a window of places.

        With `recording`, what layers add to the answer's states is stored too, for steps that run a part of a window.
        """
        layers, length = self.adapter.decoder.layers, answer.ids.shape[1]
        cache, changes = IndexedCache(len(layers), 0), list[Tensor]()
        with recorded_changes(changes, layers, length) if recording else nullcontext():
            states, records, stages = self._whole(prompt, answer, samples, budget, cache)
        return StoredSequence(
            cache, prompt.layout, stages, states, length, records, window, changes
        )

    @torch.inference_mode()
    def denoise_window(self, stored: StoredSequence, answer: AnswerState, part: int = 0) -> None:
        """Run the window's places of an answer against a stored sequence, and update what is stored of them.

        With `part`, only so many run in each layer but the first: those with the most changed values.
        """
        ids = answer.ids[:, stored.window.start : stored.window.stop]
        run_window(self.setup, stored, self.adapter.model.get_input_embeddings()(ids), part)

    @torch.inference_mode()
    def logits_of(self, stored: StoredSequence, answer: AnswerState) -> Tensor:
        """Return the logits (B, M, V) of the positions that need them, not checked, by their last states."""
        return self._logits(answer.choose(stored.states))

    def _logits(self, states: Tensor) -> Tensor:
        """Return the logits (B, M, V) of last states (B, M, D), on the device of the answer's ids."""
        logits: Tensor = self.adapter.model.get_output_embeddings()(states)
        return logits.to(self.adapter.device)

    def _whole(
        self,
        prompt: Prompt,
        answer: AnswerState,
        samples: Sequence[str],
        budget: Budget,
        cache: IndexedCache | None = None,
    ) -> tuple[Tensor, tuple[SampleRecord, ...], tuple[Stage, ...]]:
        """Run the whole sequence, into a cache if there is one; return states, records and stages.

        The states (B, G, D) are those of the answer's positions; if predictions are shifted (B, 1 + G, D), that of the
        prompt's last token first.
        """
        adapter, count = self.adapter, answer.ids.shape[1]
        answer_embeddings = adapter.model.get_input_embeddings()(answer.ids)
        embeddings = torch.cat([prompt.arguments["inputs_embeds"], answer_embeddings], 1)
        layout = prompt.layout.extended_by(count)
        inputs: Mapping[str, Any] = {
            **prompt.inputs,
            **{DECIDERS: answer.deciders, STEP: answer.step, FIRST_KEPT: answer.first_kept},
        }
        sequence = replace(
            prompt, inputs=inputs, layout=layout, arguments={"inputs_embeds": embeddings}
        )
        self._start("denoise", sequence)
        setup = replace(self.setup, budget=budget)
        hidden, records, stages = run_stack(
            setup, self._active, sequence, samples, cache, answer.step
        )
        return hidden[:, -count - self._is_shifted :], records, stages

    def cache_prompt(
        self, prompt: Prompt, samples: Sequence[str], answer_length: int
    ) -> CachedPrompt:
        """Run prompts that see only themselves, once for all steps of answers of `answer_length` positions.

        Raises:
            BudgetError: the budget cannot be met.
            RuntimeError: outside the `with` block.
        """
        self._start("cache_prompt", prompt)
        return cache_prompt(self.setup, self._active, prompt, samples, answer_length)

    @torch.inference_mode()
    def logits_after(self, cached_prompt: CachedPrompt) -> Tensor:
        """Return the logits (B, 1, V) of the prompts' last tokens."""
        return self._logits(cached_prompt.last)

    @property
    def _is_shifted(self) -> bool:
        """Whether a position predicts the next token."""
        facts = self.adapter.facts.diffusion
        return facts is not None and facts.shifted

    @torch.inference_mode()
    def denoise_cached(
        self,
        cached_prompt: CachedPrompt,
        answer: AnswerState,
        samples: Sequence[str],
        budget: Budget,
    ) -> tuple[Tensor, tuple[SampleRecord, ...]]:
        """Run one step of the answer's positions against a cached prompt; arguments and result as in `denoise`.

        A method that merges entries does so by this step's deciders, or keeps what an earlier step merged; any other
        method has acted in the prompt's run.
        """
        adapter, cache = self.adapter, cached_prompt.cache
        embeddings = adapter.model.get_input_embeddings()(answer.ids)
        method = as_denoiser(self.setup.method)
        merger: EntryMerger | None = None
        if method is not None and self.setup.sites:
            keep_of = partial(budget.keep, method, adapter.facts)
            rows = zip(cached_prompt.layout.counts, cached_prompt.layout.text, strict=True)
            keep = tuple(keep_of(n, text)[0] if n else 0 for n, text in rows)
            merger = EntryMerger(self.setup, method, cached_prompt, answer, keep)
        if merger is None or merger.idle:
            n_layers = len(adapter.decoder.layers)
            states = run_answer(
                self.setup,
                cached_prompt,
                cached_prompt.stages,
                cache,
                cached_prompt.arguments,
                embeddings,
            )
        else:
            n_layers = merger.first_merged
            merged = merger.choice.stages, merger.cache(), merger.choice.arguments
            deciding = adapter.decoder.layers[n_layers - 1].self_attn
            with AttentionTap([] if merger.holds else [(deciding, merger.choose)]):
                states = run_answer(self.setup, cached_prompt, *merged, embeddings)
        cache.cut(answer.ids.shape[1], n_layers)
        if self._is_shifted:
            states = torch.cat([cached_prompt.last, states], 1)
        logits = self._logits(answer.choose(states))
        return logits, cached_prompt.step_records() if merger is None else merger.records()


@dataclass(frozen=True)
class AnswerState:
    """An answer between two steps.

    Attributes:
        ids: (B, G) token at each position, masks where none has been unveiled.
        deciders: (B, G) booleans, the positions unveiled in the previous step.
        step: number of the next step.
        places: (B, M) positions that need logits; None: all.
        most_deciders: deciders of the row with the most of them; None: not known without reading the device.
        first_kept: indices (n,) of the visual tokens that the first step kept, of each row; empty in that step.
    """

    ids: Tensor
    deciders: Tensor
    step: int
    places: Tensor | None = None
    most_deciders: int | None = None
    first_kept: Sequence[Tensor] = ()

    def choose(self, states: Tensor) -> Tensor:
        """Return the states (B, M, D) that predict the positions that need logits, out of those of all (B, G, D).

        More than G states: of the token before the answer, then of its positions.
        """
        if self.places is None:
            return states[:, : self.ids.shape[1]]
        places = self.places.to(states.device)  # the last layer's, and the ids' the first's
        return states[rows_of(places), places]
