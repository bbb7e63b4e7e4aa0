"""Answers of a denoising model: all masks at first, then at each step the words of highest confidence are revealed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock
from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.decoding.diffusion.answer_progress import AnswerProgress, candidates
from espalier.harness.decoding.diffusion.denoising_record import DenoisedStep, record_of
from espalier.harness.decoding.diffusion.denoising_settings import MARK, Denoising, check_caches
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.cached_steps import CachedPrompt, StoredSequence
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.engine.finite_logits import NonFiniteLogits
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import GeneratedBatch
from espalier.harness.errors import Refused, UserError
from espalier.harness.models.adapter import Adapter
from espalier.methods.chance import row_generators
from espalier.methods.select.topk import rows_of


class DenoisingGenerator:
    """Implements `Generator` (harness/kinds/kind.py) on an open session.

    Args:
        session: runs the steps.
        adapter: its model, with facts about its denoising.
    """

    def __init__(self, session: DenoisingSession, adapter: Adapter) -> None:
        self._session = session
        self._adapter = adapter
        facts = adapter.facts.diffusion
        if facts is None:
            raise Refused(
                f"model={adapter.spec.name!r} generates one token after another; valid: one with model.facts.diffusion"
            )
        self._facts: DiffusionFacts = facts

    def generate(
        self, inputs: Mapping[str, Any] | Prompt, samples: Sequence[str], **generation: Any
    ) -> GeneratedBatch:
        """Answer one left-padded batch.

        Args:
            inputs: result of the adapter's `encode`, or a prompt made from it.
            samples: one unique id for each row; they seed the rows' generators.
            **generation: settings, as read by `Denoising.of`; with `output_logits` the logits of every step are kept,
                as (B, steps * G, V).

        Raises:
            UserError: settings that do not fit together.
            NonFiniteLogits: the model's logits hold NaN or infinity.
        """
        keep_logits, session = bool(generation.pop("output_logits", False)), self._session
        settings = Denoising.of(generation, self._facts)
        start = self._start(settings)
        settings = settings.starting_from(start, self._facts)
        check_caches(
            settings, self._adapter.spec, session.method, session.setup.emulate, len(samples)
        )
        budgets = step_budgets(
            session.method,
            session.budget,
            self._adapter.facts,
            settings.planned,
            settings.prefix_cache,
            settings.blocks,
        )
        started = time.perf_counter()
        prompt = inputs if isinstance(inputs, Prompt) else session.prompt(inputs)
        vision_ms = 1000 * (time.perf_counter() - started)
        self._check_positions(prompt, settings.length)
        clock = Clock(*self._adapter.devices)
        cached = (
            session.cache_prompt(prompt, samples, settings.length)
            if settings.prefix_cache
            else None
        )
        clock.drain()
        answers = torch.tensor(start, device=self._adapter.device).repeat(len(samples), 1)
        progress, steps, logits = self._run_steps(
            prompt, answers, samples, settings, budgets, keep_logits, cached
        )
        lengths = progress.lengths()
        ends = torch.tensor(lengths, device=answers.device).unsqueeze(1)
        padding = torch.arange(answers.shape[1], device=answers.device) >= ends
        records = tuple(
            record_of(
                steps,
                row,
                settings,
                lengths[row],
                vision_ms / len(samples),
                None if cached is None else cached.records[row],
            )
            for row in range(len(samples))
        )
        ids = progress.ids.masked_fill(padding, self._adapter.pad_id)
        return GeneratedBatch(ids, records, torch.cat(logits, 1) if keep_logits else None)

    @torch.inference_mode()
    def _run_steps(
        self,
        prompt: Prompt,
        ids: Tensor,
        samples: Sequence[str],
        settings: Denoising,
        budgets: Sequence[Budget],
        keep_logits: bool,
        cached: CachedPrompt | None,
    ) -> tuple[AnswerProgress, list[DenoisedStep], list[Tensor]]:
        """Run steps until every row is complete; return the answers, the steps, and their logits if they are kept.

        Each step reads from the device once.
        """
        facts, session = self._facts, self._session
        generators = row_generators(session.setup.seed, samples, 0, ids.device)
        if cached is not None and settings.says_first:
            # The likeliest words after the prompts, as the last tokens of these predict them.
            scores = session.logits_after(cached)
            scores[..., list(facts.silent_ids)] = float("-inf")
            ids[:, :1] = scores.argmax(-1)
        encode = partial(self._adapter.processor.tokenizer.encode, add_special_tokens=False)
        stop_words = [*map(encode, settings.stop_words), *([end] for end in facts.end_ids)]
        state = AnswerProgress(ids, settings, facts, stop_words, generators)
        steps: list[DenoisedStep] = []
        kept_logits: list[Tensor] = []
        stored: StoredSequence | None = None
        before = time.perf_counter()
        while not state.complete:
            step, places = len(steps), state.places()
            needed = None if keep_logits else places
            n_deciders = max(steps[-1].reveals) if steps else None
            first_records = steps[0].records if steps else ()
            first_kept = [record.origin for record in first_records if record.origin is not None]
            window, part = None, 0
            answer = AnswerState(state.ids, state.deciders, step, needed, n_deciders, first_kept)
            if settings.stores_sequence:
                running = settings.window(state.block)
                part = settings.part if settings.is_partial(step) else 0
                if stored is None or settings.is_whole(step, stored.window != running):
                    recording, window = settings.generation_interval is not None, 0
                    stored = session.store(
                        prompt, answer, samples, budgets[step], running, recording
                    )
                else:
                    window = len(running)
                    session.denoise_window(stored, answer, part)
                logits, records = session.logits_of(stored, answer), stored.records
            elif cached is None:
                logits, records = session.denoise(prompt, answer, samples, budgets[step])
            else:
                logits, records = session.denoise_cached(cached, answer, samples, budgets[step])
            if keep_logits:
                kept_logits.append(logits)
                logits = logits[rows_of(places), places]
            finite = logits.sum((1, 2), dtype=torch.float32).isfinite()
            chosen = candidates(logits, facts.silent_ids, settings, generators, state.remaining)
            progress = state.unmask(places, *chosen)
            remaining, stops, reveals, are_finite = torch.cat(
                [progress, finite[None].long()]
            ).tolist()
            for sample, is_finite in zip(samples, are_finite, strict=True):
                if not is_finite:
                    raise NonFiniteLogits(sample, step)
            now = time.perf_counter()
            scored, step_ms = list(state.remaining), 1000 * (now - before)
            steps.append(DenoisedStep(records, scored, reveals, step_ms, window, part))
            state.advance(remaining, stops)
            before = now
        return state, steps, kept_logits

    def _start(self, settings: Denoising) -> list[int]:
        """Return the tokens that an answer starts with, masks where there is none."""
        mask = self._facts.mask_id
        if settings.infill is None:
            return [mask] * settings.length
        tokenizer = self._adapter.processor.tokenizer
        words, *marked = MARK.split(settings.infill)
        ids = list(tokenizer.encode(words, add_special_tokens=False))
        for number, words in zip(marked[::2], marked[1::2], strict=True):
            ids += [mask] * int(number or 1)
            ids += tokenizer.encode(words, add_special_tokens=False)
        return ids

    def _check_positions(self, prompt: Prompt, places: int) -> None:
        """Refuse prompts that leave too few positions for the answer.

        Raises:
            UserError: the line has the longest prompt, the places and the model's positions.
        """
        limit = getattr(self._adapter.decoder.config, "max_position_embeddings", None)
        layout = prompt.layout
        longest = max(n + text for n, text in zip(layout.counts, layout.text, strict=True))
        if limit is not None and longest + places > limit:
            raise UserError(
                f"generation.max_new_tokens={places}: a prompt has {longest} tokens, and "
                f"model={self._adapter.spec.name!r} has {limit} positions for both; valid: at most {limit - longest}"
            )
