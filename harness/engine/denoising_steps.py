"""Denoising steps: prompt and answer run through the decoder stack together, or the answer after a cached prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.attention_probe import AttentionTap
from espalier.harness.engine.finite_logits import NonFiniteLogits
from espalier.harness.engine.forward_pass import Pass
from espalier.harness.engine.merged_entries import EntryMerger
from espalier.harness.engine.positions import closed_positions
from espalier.harness.engine.prefix_cache import CachedPrompt, cache_prompt, run_answer
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import Record
from espalier.harness.engine.session import Session
from espalier.harness.engine.signals.deciders import DECIDERS
from espalier.methods.denoiser import as_denoiser


@dataclass(frozen=True)
class Answering:
    """An answer between two steps.

    Attributes:
        ids: (B, G) token at each position, masks where none has been unveiled.
        deciders: (B, G) booleans, the positions unveiled in the previous step.
        step: number of the next step.
    """

    ids: Tensor
    deciders: Tensor
    step: int


class DenoisingSession(Session):
    """Runs single steps of a denoising model, with visual tokens reduced again in each.

    Arguments are those of `Session`; its budget is used where a step has none of its own.
    """

    steps: ClassVar[bool] = True

    @torch.inference_mode()
    def denoise(
        self, prompt: Prompt, answer: Answering, samples: Sequence[str], budget: Budget
    ) -> tuple[Tensor, tuple[Record, ...]]:
        """Run one step over the whole sequence; every token sees every other.

        Args:
            prompt: of the batch, as `prompt` made it.
            answer: its current state.
            samples: one id for each row.
            budget: of this step.

        Returns:
            The logits (B, G, V) of the answer's positions, and each row's record.

        Raises:
            NonFiniteLogits: the logits contain NaN or infinity.
            BudgetError: the budget cannot be met.
            RuntimeError: outside the `with` block.
        """
        adapter, count = self.adapter, answer.ids.shape[1]
        answer_embeddings = adapter.model.get_input_embeddings()(answer.ids)
        embeddings = torch.cat([prompt.arguments["inputs_embeds"], answer_embeddings], 1)
        layout = prompt.layout.extended_by(count)
        inputs: Mapping[str, Any] = {**prompt.inputs, DECIDERS: answer.deciders}
        # A denoising stack takes no other argument of the family than the embeddings.
        sequence = replace(
            prompt, inputs=inputs, layout=layout, arguments={"inputs_embeds": embeddings}
        )
        start = self._start("denoise", sequence)
        setup = replace(self.setup, budget=budget)
        setup.signals.begin(inputs, prompt.signals)
        valid = layout.valid.to(embeddings.device)
        with (
            Pass(setup, layout, tuple(samples), start.prompt, answer.step) as current_pass,
            self._active.running(current_pass.clock, current_pass),
        ):
            hidden = adapter.decoder(
                inputs_embeds=embeddings,
                attention_mask=valid.long(),
                position_ids=closed_positions(valid),
                use_cache=False,
            ).last_hidden_state
            logits: Tensor = adapter.model.get_output_embeddings()(hidden[:, -count:])
            records = current_pass.step_records()
        _check_finite(logits, samples, answer.step)
        return logits, records

    def remember(self, prompt: Prompt, samples: Sequence[str], answer_length: int) -> CachedPrompt:
        """Run prompts that see only themselves, once for all steps of answers of `answer_length` positions.

        Raises:
            BudgetError: the budget cannot be met.
            RuntimeError: outside the `with` block.
        """
        self._start("remember", prompt)
        return cache_prompt(self.setup, self._active, prompt, samples, answer_length)

    @torch.inference_mode()
    def denoise_behind(
        self, cached_prompt: CachedPrompt, answer: Answering, samples: Sequence[str], budget: Budget
    ) -> tuple[Tensor, tuple[Record, ...]]:
        """Run one step of the answer's positions against a cached prompt; arguments and result as in `denoise`.

        A method that merges entries does so by this step's deciders; any other method has acted in the prompt's run.
        """
        adapter, count = self.adapter, answer.ids.shape[1]
        answer_embeddings = adapter.model.get_input_embeddings()(answer.ids)
        merger, depth = (
            self._make_merger(cached_prompt, answer, budget),
            len(adapter.decoder.layers),
        )
        stages, cache = cached_prompt.stages, cached_prompt.cache
        if merger is None or merger.idle:
            states = run_answer(self.setup, cached_prompt, stages, cache, answer_embeddings)
            n_layers = depth
        else:
            stages, merged_cache = merger.stages(), merger.cache()
            with AttentionTap([merger.watched_attention]):
                states = run_answer(
                    self.setup, cached_prompt, stages, merged_cache, answer_embeddings
                )
            n_layers = merger.first_merged
        cached_prompt.cache.cut(count, n_layers)
        logits: Tensor = adapter.model.get_output_embeddings()(states)
        _check_finite(logits, samples, answer.step)
        return logits, cached_prompt.step_records() if merger is None else merger.records()

    def _make_merger(
        self, cached_prompt: CachedPrompt, answer: Answering, budget: Budget
    ) -> EntryMerger | None:
        """Return the merger of a step; None if the method never merges."""
        method, facts, layout = self.setup.method, self.adapter.facts, cached_prompt.layout
        if as_denoiser(method) is None or not self.setup.sites:
            return None
        rows = zip(layout.counts, layout.text, strict=True)
        keep = [budget.keep(method, facts, n, text)[0] if n else 0 for n, text in rows]
        return EntryMerger(self.setup, cached_prompt, answer.deciders, keep)


def _check_finite(logits: Tensor, samples: Sequence[str], step: int) -> None:
    non_finite = (~logits.sum((1, 2), dtype=torch.float32).isfinite()).tolist()
    for sample, row_non_finite in zip(samples, non_finite, strict=True):
        if row_non_finite:
            raise NonFiniteLogits(sample, step)
