"""Answers of a denoising model: all masks at first, then at each step the words of highest confidence are revealed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock
from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.decoding.diffusion.cached_prompt import check_prefix_cache
from espalier.harness.decoding.diffusion.denoising_record import record_of
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.engine.prefix_cache import CachedPrompt
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import GeneratedBatch, SampleRecord, answer_lengths
from espalier.harness.errors import Refused
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import TokenReducer
from espalier.methods.chance import row_generators


def candidates(
    logits: Tensor, silent: Sequence[int], temperature: float, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Return the word of each place (B, G) and its probability among the allowed tokens, in double precision.

    At a temperature above 0 the word is drawn by the Gumbel-max rule, argmax (logits / temperature + noise); its
    confidence is its probability at temperature 1 all the same.

    Args:
        logits: (B, G, V).
        silent: ids that are never generated.
        temperature: 0 takes the likeliest, the lower id of equals.
        generators: one CPU generator for each row.
    """
    never = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    never[list(silent)] = True
    scores = logits.double().masked_fill(never, float("-inf"))
    chosen = scores
    if temperature > 0:
        drawn = [torch.rand(scores.shape[1:], generator=g, dtype=torch.double) for g in generators]
        uniform = torch.stack(drawn).clamp(min=torch.finfo(torch.double).tiny).to(scores.device)
        chosen = scores / temperature - (-uniform.log()).log()
    words = chosen.argmax(-1)
    return words, scores.softmax(-1).gather(-1, words.unsqueeze(-1)).squeeze(-1)


def unveiled(confidence: Tensor, masked: Tensor, count: int) -> Tensor:
    """Return (B, G) booleans: the `count` most confident of the places that are `masked`, the first of equals.

    Args:
        confidence: (B, G), 0 or more.
        masked: (B, G) places that may be unveiled, at least `count` in each row.
        count: 1 or more.
    """
    order = torch.where(masked, confidence, -1.0).argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(masked).scatter(1, order[:, :count], True)


@dataclass
class DenoisingState:
    """An answer in progress: the state that the next step sees, and the results of the steps so far.

    Attributes:
        ids: (B, G) words, masks at unrevealed places.
        deciders: (B, G) places revealed in the last step.
        steps: of each step, a record for each row.
        logits: (B, G, V) of each step, if requested.
    """

    ids: Tensor
    deciders: Tensor
    steps: list[tuple[SampleRecord, ...]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


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
        settings = Denoising.of(generation)
        if settings.prefix_cache:
            check_prefix_cache(self._adapter.spec, self._method, self._session.setup.emulate)
        budgets = step_budgets(
            self._method, self._budget, self._adapter.facts, settings.steps, settings.prefix_cache
        )
        started = time.perf_counter()
        prompt = inputs if isinstance(inputs, Prompt) else self._session.prompt(inputs)
        vision_ms = 1000 * (time.perf_counter() - started)
        clock = Clock(*self._adapter.devices)
        cached = (
            self._session.cache_prompt(prompt, samples, settings.length)
            if settings.prefix_cache
            else None
        )
        clock.drain()
        started = time.perf_counter()
        state = self._run_steps(
            prompt, samples, settings, budgets, bool(generation.get("output_logits", False)), cached
        )
        clock.drain()
        steps_ms = 1000 * (time.perf_counter() - started)
        ids, lengths = self._padded(state.ids)
        rows = len(samples)
        records = tuple(
            record_of(
                [step[row] for step in state.steps],
                settings,
                lengths[row],
                vision_ms / rows,
                steps_ms / rows,
                None if cached is None else cached.records[row],
            )
            for row in range(rows)
        )
        return GeneratedBatch(ids, records, torch.cat(state.logits, 1) if state.logits else None)

    def _run_steps(
        self,
        prompt: Prompt,
        samples: Sequence[str],
        settings: Denoising,
        budgets: Sequence[Budget],
        keep_logits: bool,
        cached: CachedPrompt | None,
    ) -> DenoisingState:
        """Run all steps, block by block."""
        rows, device, facts = len(samples), self._adapter.device, self._facts
        masks = torch.full((rows, settings.length), facts.mask_id, device=device)
        state = DenoisingState(masks, torch.zeros_like(masks, dtype=torch.bool))
        never_chosen = (facts.mask_id, *facts.forbidden_ids)
        generators = row_generators(self._seed, samples, 0)
        places = torch.arange(settings.length, device=device)
        per_block = settings.steps // (settings.length // settings.block)
        for step, (count, budget) in enumerate(zip(settings.reveals, budgets, strict=True)):
            answer = AnswerState(state.ids, state.deciders, step)
            if cached is None:
                logits, records = self._session.denoise(prompt, answer, samples, budget)
            else:
                logits, records = self._session.denoise_cached(cached, answer, samples, budget)
            inside = places // settings.block == step // per_block
            words, confidence = candidates(logits, never_chosen, settings.temperature, generators)
            state.deciders = unveiled(confidence, (state.ids == facts.mask_id) & inside, count)
            state.ids = torch.where(state.deciders, words, state.ids)
            state.steps.append(records)
            if keep_logits:
                state.logits.append(logits)
        return state

    def _padded(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """Return the answers padded after their first end token, and their lengths including that token."""
        lengths = answer_lengths(ids, self._facts.end_ids)
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
