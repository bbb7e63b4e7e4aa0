"""Answers of a denoising model: all masks at first, then at each step the words of highest confidence are revealed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock
from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.decoding.diffusion.answer_progress import AnswerProgress, candidates
from espalier.harness.decoding.diffusion.denoising_record import StepCounts, record_of
from espalier.harness.decoding.diffusion.denoising_settings import MARK, Denoising, check_caches
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.cached_steps import CachedPrompt, StoredSequence
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.engine.finite_logits import NonFiniteLogits
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import GeneratedBatch, SampleRecord
from espalier.harness.errors import Refused, UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import TokenReducer
from espalier.methods.chance import row_generators
from espalier.methods.select.topk import rows_of


@dataclass(frozen=True)
class DenoisedSteps:
    """The steps of a batch of answers.

    Attributes:
        progress: the answers, complete.
        steps: of each step, a record for each row.
        scored, reveals: of each step, the places of each row that had candidates, and those that got their word.
        marks: seconds before the first step and after each.
        logits: (B, G, V) of each step, if requested.
        windows: of each step, the places that ran against a stored sequence, if steps do; 0: the whole sequence ran.
        parts: of each step, those of them that ran in each layer but the first; 0: all.
    """

    progress: AnswerProgress
    steps: list[tuple[SampleRecord, ...]] = field(default_factory=list)
    scored: list[list[int]] = field(default_factory=list)
    reveals: list[list[int]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    @property
    def first_kept(self) -> list[Tensor]:
        """Of each row, the visual tokens that the first step kept; empty before that step."""
        records = self.steps[0] if self.steps else ()
        return [record.origin for record in records if record.origin is not None]

    def of_row(self, row: int) -> StepCounts:
        """Return the steps of one row, up to the one that completes it."""
        scored = [step[row] for step in self.scored if step[row]]
        reveals = [step[row] for step in self.reveals[: len(scored)]]
        records = tuple(step[row] for step in self.steps[: len(scored)])
        windows, parts = (tuple(x[: len(scored)]) for x in (self.windows, self.parts))
        return StepCounts(records, tuple(reveals), tuple(scored), windows, parts)


class DenoisingGenerator:
    """Implements `Generator` (harness/kinds/kind.py) on an open session.

    Args:
        session: runs the steps.
        adapter: its model, with facts about its denoising.
        method: the session's method.
        budget: of a run.
        seed: of the run; every sample draws from its own generator.
    """

    def __init__(
        self,
        session: DenoisingSession,
        adapter: Adapter,
        method: TokenReducer,
        budget: Budget,
        seed: int = 0,
    ) -> None:
        self._session = session
        self._adapter = adapter
        self._method = method
        self._budget = budget
        self._seed = seed
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
        keep_logits = bool(generation.pop("output_logits", False))
        settings = Denoising.of(generation, self._facts)
        start = self._start(settings)
        settings = settings.starting_from(start, self._facts)
        check_caches(
            settings, self._adapter.spec, self._method, self._session.setup.emulate, len(samples)
        )
        budgets = step_budgets(
            self._method,
            self._budget,
            self._adapter.facts,
            settings.planned,
            settings.prefix_cache,
            settings.blocks,
        )
        started = time.perf_counter()
        prompt = inputs if isinstance(inputs, Prompt) else self._session.prompt(inputs)
        vision_ms = 1000 * (time.perf_counter() - started)
        self._check_positions(prompt, settings.length)
        clock = Clock(*self._adapter.devices)
        cached = (
            self._session.cache_prompt(prompt, samples, settings.length)
            if settings.prefix_cache
            else None
        )
        clock.drain()
        answers = torch.tensor(start, device=self._adapter.device).repeat(len(samples), 1)
        denoised = self._run_steps(prompt, answers, samples, settings, budgets, keep_logits, cached)
        step_ms = [1000 * (after - before) for before, after in pairwise(denoised.marks)]
        ids, lengths = self._padded(denoised.progress)
        rows = len(samples)
        records = tuple(
            record_of(
                denoised.of_row(row),
                settings,
                lengths[row],
                vision_ms / rows,
                [step / rows for step in step_ms],
                None if cached is None else cached.records[row],
            )
            for row in range(rows)
        )
        return GeneratedBatch(ids, records, torch.cat(denoised.logits, 1) if keep_logits else None)

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
    ) -> DenoisedSteps:
        """Run steps until every row is complete. Each reads from the device once."""
        facts, session = self._facts, self._session
        generators = row_generators(self._seed, samples, 0, ids.device)
        if cached is not None and settings.says_first:
            ids[:, :1] = self._first_words(cached)
        state = AnswerProgress(ids, settings, facts, self._stops(settings), generators)
        denoised = DenoisedSteps(state, marks=[time.perf_counter()])
        stored: StoredSequence | None = None
        while not state.complete:
            step, places = len(denoised.steps), state.places()
            needed = None if keep_logits else places
            n_deciders = max(denoised.reveals[-1]) if denoised.reveals else None
            first_kept = denoised.first_kept
            answer = AnswerState(state.ids, state.deciders, step, needed, n_deciders, first_kept)
            if settings.stores_sequence:
                window = settings.window(state.block)
                part = settings.part if settings.is_partial(step) else 0
                if stored is None or settings.is_whole(step, stored.window != window):
                    recording = settings.generation_interval is not None
                    stored = session.store(
                        prompt, answer, samples, budgets[step], window, recording
                    )
                    denoised.windows.append(0)
                else:
                    session.denoise_window(stored, answer, part)
                    denoised.windows.append(len(window))
                denoised.parts.append(part)
                logits, records = session.logits_of(stored, answer), stored.records
            elif cached is None:
                logits, records = session.denoise(prompt, answer, samples, budgets[step])
            else:
                logits, records = session.denoise_cached(cached, answer, samples, budgets[step])
            if keep_logits:
                denoised.logits.append(logits)
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
            denoised.marks.append(time.perf_counter())
            denoised.steps.append(records)
            denoised.scored.append(list(state.remaining))
            denoised.reveals.append(reveals)
            state.advance(remaining, stops)
        return denoised

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

    def _first_words(self, cached: CachedPrompt) -> Tensor:
        """Return (B, 1) the likeliest words after the prompts, as the last tokens of these predict them."""
        scores = self._session.logits_after(cached)
        scores[..., list(self._facts.silent_ids)] = float("-inf")
        return scores.argmax(-1)

    def _stops(self, settings: Denoising) -> list[list[int]]:
        """Return the tokens of every stop word, then every end token."""
        tokenizer = self._adapter.processor.tokenizer
        words = [tokenizer.encode(word, add_special_tokens=False) for word in settings.stop_words]
        return [*words, *([end] for end in self._facts.end_ids)]

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

    def _padded(self, progress: AnswerProgress) -> tuple[Tensor, list[int]]:
        """Return the answers padded after their ends, and their lengths."""
        ids, lengths = progress.ids, progress.lengths()
        ends = torch.tensor(lengths, device=ids.device).unsqueeze(1)
        padding = torch.arange(ids.shape[1], device=ids.device) >= ends
        return ids.masked_fill(padding, self._adapter.pad_id), lengths


@contextmanager
def denoising(
    spec: AnswerRequest, adapter: Adapter, method: TokenReducer, budget: Budget, prior: Any = None
) -> Iterator[DenoisingGenerator]:
    """Open a session for the steps of a run, and yield its generator."""
    session = DenoisingSession(
        adapter,
        method,
        budget,
        seed=spec.seed,
        backend=spec.engine.backend,
        positions=spec.engine.positions,
        prior=prior,
        separators=spec.engine.separators,
    )
    with session:
        yield DenoisingGenerator(session, adapter, method, budget, spec.seed)
