"""Answers of a denoising model: all masks at first, then at each step the words of highest confidence are revealed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.cost.clock import Clock, drain
from espalier.harness.cost.facts import DiffusionFacts
from espalier.harness.decoding.diffusion.denoising_record import DenoisedStep, record_of
from espalier.harness.decoding.diffusion.denoising_settings import (
    MARK,
    Denoising,
    check_caches,
    drawn_counts,
)
from espalier.harness.decoding.diffusion.step_budgets import step_budgets
from espalier.harness.engine.cached_steps import CachedPrompt, StoredSequence
from espalier.harness.engine.denoising_steps import AnswerState, DenoisingSession
from espalier.harness.engine.finite_logits import NonFiniteLogits
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import GeneratedBatch, answer_lengths
from espalier.harness.errors import Refused, UserError
from espalier.harness.models.adapter import Adapter
from espalier.harness.specs.generation import ORIGIN
from espalier.methods.chance import row_generators
from espalier.methods.select.topk import indices_of, rows_of


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
        clock = Clock(*self._adapter.devices)
        with clock.phase("vision"):
            prompt = inputs if isinstance(inputs, Prompt) else session.prompt(inputs)
        self._check_positions(prompt, settings.length)
        cached = (
            session.cache_prompt(prompt, samples, settings.length)
            if settings.prefix_cache
            else None
        )
        drain(clock.cards)  # the first step's time begins
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
                clock.totals_ms()["vision"] / len(samples),
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

        Each step sends to the device once, and reads from it once.
        """
        facts, session, conditions = self._facts, self._session, self._session.setup.conditions
        silent = torch.tensor(facts.silent_ids, dtype=torch.long, device=ids.device)
        generators = row_generators(session.setup.seed, samples, 0, ids.device)
        if cached is not None and settings.says_first:
            # The likeliest words after the prompts, as the last tokens of these predict them.
            scores = session.logits_after(cached)
            ids[:, :1] = scores.index_fill_(-1, silent, float("-inf")).argmax(-1)
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
            chosen = candidates(logits, silent, settings, generators, state.remaining)
            progress = state.unmask(places, *chosen)
            numbers = [progress.flatten(), finite.long(), conditions.flags(ids.device)]
            counts, rows = torch.cat(numbers).tolist(), len(samples)
            conditions.check(counts[4 * rows :])
            remaining, stops, reveals, is_finite = (
                counts[part * rows : (part + 1) * rows] for part in range(4)
            )
            for sample, holds in zip(samples, is_finite, strict=True):
                if not holds:
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


class AnswerProgress:
    """The answers of a batch between two steps; the words stay on the device, counts are known to the host.

    Each row completes its blocks from left to right. If answers freeze, nothing is unmasked at or after a row's stop,
    and the row is complete once every place before it has its word.

    Args:
        ids: (B, G) words that the answers start with, masks where there is none.
        settings: of the answers.
        facts: of the model.
        stops: sequences of tokens that stop an answer, in the order in which they are looked for.
        generators: of each row, on the device of the words.
    """

    def __init__(
        self,
        ids: Tensor,
        settings: Denoising,
        facts: DiffusionFacts,
        stops: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
    ) -> None:
        rows, device = len(ids), ids.device
        self._settings, self._facts, self._generators = settings, facts, generators
        self._stops = [
            torch.tensor(stop, device=device) for stop in stops if 0 < len(stop) <= settings.length
        ]
        self._numbers = torch.arange(settings.length, device=device)
        #: (B, G) words, masks where there is none yet.
        self.ids = ids
        #: (B, G) places that got their word in the last step.
        self.deciders = torch.zeros_like(self.ids, dtype=torch.bool)
        first = 0 if settings.masked(0) else 1
        #: Masked places of each row's block that may get a word; 0 once the row is complete.
        self.remaining = [settings.masked(first)] * rows
        self._blocks = [first] * rows
        #: Of each row, the places unmasked at each step left of its block, by the schedule.
        self._reveals = [self._reveals_of(row) for row in range(rows)]
        self._stop = torch.full((rows,), settings.length, device=device)
        #: (2, B, 1) of `places`.
        self._sent: Tensor

    @property
    def complete(self) -> bool:
        """Whether no row has a place left."""
        return not any(self.remaining)

    @property
    def block(self) -> int:
        """Number of the first block that is not complete in some row."""
        open_rows = zip(self._blocks, self.remaining, strict=True)
        return min(block for block, remaining in open_rows if remaining)

    def places(self) -> Tensor:
        """Return (B, M) places that may get a word, ascending; a row with fewer than M has others at the end.

        Sends what the step needs: the block of each row, and the words that it gets by the schedule.
        """
        reveals = [reveals[0] if reveals else 0 for reveals in self._reveals]
        self._sent = torch.tensor([self._blocks, reveals]).to(self.ids.device).unsqueeze(2)
        return indices_of(self._open(), max(self.remaining))

    def unmask(self, places: Tensor, words: Tensor, confidence: Tensor) -> Tensor:
        """Give the most confident places their words; return (3, B) places left in the block, stops, and words given.

        Args:
            places: (B, M) of `places`.
            words: (B, M) their candidates.
            confidence: (B, M) of the candidates; of equals the first place wins.
        """
        is_open = self._open().gather(1, places)
        ranked = confidence.masked_fill(~is_open, float("-inf"))
        rank = ranked.argsort(dim=1, descending=True, stable=True).argsort(1)
        if self._settings.threshold is None:
            chosen = is_open & (rank < self._sent[1])
        else:
            chosen = is_open & ((rank == 0) | (confidence >= self._settings.threshold))
        words = torch.where(chosen, words, self.ids.gather(1, places))
        self.ids = self.ids.scatter(1, places, words)
        self.deciders = torch.zeros_like(self.deciders).scatter(1, places, chosen)
        self._reveals = [reveals[1:] for reveals in self._reveals]
        if self._settings.stop == "freeze":
            self._stop = self._first_stops()
        return torch.stack([self._open().sum(1), self._stop, chosen.sum(1)])

    def advance(self, remaining: Sequence[int], stops: Sequence[int]) -> None:
        """Go on to the next block in rows that have none left in theirs; both counts are those of `unmask`."""
        size = self._settings.block
        for row, (count, stop) in enumerate(zip(remaining, stops, strict=True)):
            if self.remaining[row] and not count:
                self._blocks[row] += 1
                count = self.remaining[row] = size if self._blocks[row] * size < stop else 0
                self._reveals[row] = self._reveals_of(row) if count else ()
            self.remaining[row] = count

    def lengths(self) -> list[int]:
        """Return the tokens of each row's answer, an end token included."""
        rows = len(self.remaining)
        if self._settings.stop == "none":
            return [self._settings.length] * rows
        if self._settings.stop == "cut":
            return answer_lengths(self.ids, self._facts.end_ids)
        last = self.ids.gather(1, self._stop.clamp(max=self._settings.length - 1).unsqueeze(1))
        ended = torch.isin(last[:, 0], self.ids.new_tensor(self._facts.end_ids))
        return (self._stop + (ended & (self._stop < self._settings.length))).tolist()

    def _reveals_of(self, row: int) -> tuple[int, ...]:
        settings = self._settings
        if settings.schedule != ORIGIN:
            return settings.reveals_of(self._blocks[row])
        uniform = torch.empty(self.remaining[row], dtype=torch.double, device=self.ids.device)
        uniform.uniform_(generator=self._generators[row])
        return drawn_counts(uniform, settings.block_steps, settings.eps)

    def _open(self) -> Tensor:
        """Return (B, G) masked places of each row's block before its stop."""
        inside = self._numbers // self._settings.block == self._sent[0]
        before = self._numbers < self._stop.unsqueeze(1)
        return (self.ids == self._facts.mask_id) & inside & before

    def _first_stops(self) -> Tensor:
        """Return (B,) the first place of a stop, the length without one.

        As in LLaDA-V's loop, a sequence is looked for only in rows where none of those before it, and none in an
        earlier step, was there; the first always is.
        """
        stop, length = self._stop, self._settings.length
        for number, sequence in enumerate(self._stops):
            windows = (self.ids.unfold(1, len(sequence), 1) == sequence).all(-1)
            first = torch.where(windows.any(1), windows.long().argmax(1), length)
            earlier = torch.minimum(stop, first)
            stop = earlier if number == 0 else torch.where(stop < length, stop, earlier)
        return stop


#: Added to a probability before its logarithm, as in LaViDa's code.
_EPSILON = 1e-10


def candidates(
    logits: Tensor,
    silent: Tensor,
    settings: Denoising,
    generators: Sequence[torch.Generator],
    counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the word (B, M) of each place and its confidence (B, M), in double precision.

    At a temperature above 0 the word is drawn from the softmax of logits / temperature over the words that top_k and
    top_p leave: the first at which its cumulative sum exceeds a uniform number, one of each place. The releases' rule
    (Gumbel-max) has the same distribution and draws a number for every word. Confidences are of temperature 1, over all
    words that may be said. At an `alg_temp` above 0, places are drawn one after another in proportion to the softmax of
    confidence / alg_temp (Dream): the highest of confidence / alg_temp plus Gumbel noise have that distribution.

    Args:
        logits: (B, M, V).
        silent: (n,) ids that are never said.
        settings: temperature, top_k, top_p, remasking and alg_temp.
        generators: of each row, on the device of the logits.
        counts: places of each row that need a word, its first ones: a row draws for these, whatever its batch.

    Cost: O(B M V), several passes over the scores in double precision.
    """
    # Padding may have given the head more rows than there are tokens; a copy, since callers may keep the logits.
    scores = logits.to(torch.double, copy=True).index_fill_(-1, silent, float("-inf"))
    top, words = scores.max(-1)
    if settings.temperature > 0:
        relative = (scores - top.unsqueeze(-1)).div_(settings.temperature)
        sums = _cut(relative, settings.top_k, settings.top_p).exp_().cumsum(-1)
        # Just below 1, so that the product is below the whole sum.
        uniform = _uniform(top, generators, counts).mul_(1 - 2.0**-52).unsqueeze(-1)
        words = torch.searchsorted(sums, uniform * sums[..., -1:], right=True).squeeze(-1)
    if settings.remasking == "random":
        return words, _uniform(top, generators, counts)
    confidence = _confidence(scores, top, words, settings.remasking)
    if settings.alg_temp > 0:
        noise = _uniform(top, generators, counts).log_().neg_().log_()
        confidence = confidence / settings.alg_temp - noise
    return words, confidence


def _confidence(scores: Tensor, top: Tensor, words: Tensor, remasking: str) -> Tensor:
    """Return how confident each place (B, M) is, of scores (B, M, V) that are written over, and their maxima."""
    if remasking == "low_confidence":
        relative = scores.sub_(top.unsqueeze(-1))
        word_scores = relative.gather(-1, words.unsqueeze(-1)).squeeze(-1)
        return word_scores.exp_() / relative.exp_().sum(-1)
    probabilities = scores.softmax(-1)
    if remasking == "entropy":
        return (probabilities * (probabilities + _EPSILON).log()).sum(-1)
    first, second = probabilities.topk(2, -1).values.unbind(-1)
    return first - second


def _uniform(like: Tensor, generators: Sequence[torch.Generator], counts: Sequence[int]) -> Tensor:
    """Return numbers from 0 to 1 for the first places of each row, and zeros for the others."""
    numbers = torch.zeros_like(like)
    for row, (generator, count) in enumerate(zip(generators, counts, strict=True)):
        numbers[row, :count].uniform_(generator=generator)
    return numbers


def _cut(scores: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return scores (..., V) without the words after the `top_k` likeliest and after a share `top_p`."""
    if top_k is not None:
        lowest = scores.topk(min(top_k, scores.shape[-1]), -1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    if top_p is not None:
        ordered, words = scores.sort(dim=-1, descending=True, stable=True)
        shares = ordered.softmax(-1)
        is_cut = shares.cumsum(-1) - shares >= top_p
        is_cut[..., 0] = False
        scores = scores.masked_fill(is_cut.scatter(-1, words, is_cut), float("-inf"))
    return scores
