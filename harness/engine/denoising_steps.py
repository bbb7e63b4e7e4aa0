"""Denoising steps: prompt and answer run through the decoder stack together, or the answer behind a cached prompt."""

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
from espalier.harness.engine.merged_entries import Merging
from espalier.harness.engine.positions import closed
from espalier.harness.engine.prefix_cache import CachedPrompt, remembered, run_behind
from espalier.harness.engine.prompt import Prompt
from espalier.harness.engine.record import Record
from espalier.harness.engine.session import Session
from espalier.harness.engine.signals.deciders import DECIDERS
from espalier.methods.denoiser import as_denoiser


@dataclass(frozen=True)
class Answering:
    """An answer between two steps.

    Attributes:
        ids: (B, G) what stands in each place, masks where nothing has been said.
        deciders: (B, G) booleans, the places unveiled in the step before.
        step: number of the step to come.
    """

    ids: Tensor
    deciders: Tensor
    step: int


class DenoisingSession(Session):
    """Runs single steps of a model that denoises, with visual tokens reduced anew in each.

    Arguments are those of `Session`; its budget is that of steps whose own is not given.
    """

    steps: ClassVar[bool] = True

    @torch.inference_mode()
    def denoise(
        self, prompt: Prompt, answer: Answering, samples: Sequence[str], budget: Budget
    ) -> tuple[Tensor, tuple[Record, ...]]:
        """Run one step over the whole sequence; every token sees every other.

        Args:
            prompt: of the batch, as `prompt` made it.
            answer: as it stands.
            samples: one id for each row.
            budget: of this step.

        Returns:
            The logits (B, G, V) of the answer's places, and for each row what was kept and how long it took.

        Raises:
            NonFiniteLogits: the logits hold NaN or infinity.
            BudgetError: the budget cannot be met.
            RuntimeError: outside the `with` block.
        """
        adapter, count = self.adapter, answer.ids.shape[1]
        words = adapter.model.get_input_embeddings()(answer.ids)
        embeddings = torch.cat([prompt.arguments["inputs_embeds"], words], 1)
        layout = prompt.layout.followed_by(count)
        inputs: Mapping[str, Any] = {**prompt.inputs, DECIDERS: answer.deciders}
        # Of what a family hands over beside the embeddings, a stack that denoises takes nothing.
        whole = replace(
            prompt, inputs=inputs, layout=layout, arguments={"inputs_embeds": embeddings}
        )
        start = self._start("denoise", whole)
        setup = replace(self.setup, budget=budget)
        setup.signals.begin(inputs, prompt.signals)
        valid = layout.valid.to(embeddings.device)
        with (
            Pass(setup, layout, tuple(samples), start.prompt, answer.step) as this,
            self._current.running(this.clock, this),
        ):
            hidden = adapter.decoder(
                inputs_embeds=embeddings,
                attention_mask=valid.long(),
                position_ids=closed(valid),
                use_cache=False,
            ).last_hidden_state
            logits: Tensor = adapter.model.get_output_embeddings()(hidden[:, -count:])
            records = this.step_records()
        _check_finite(logits, samples, answer.step)
        return logits, records

    def remember(self, prompt: Prompt, samples: Sequence[str], places: int) -> CachedPrompt:
        """Run prompts that see themselves alone, once for all steps of answers of `places` places.

        Raises:
            BudgetError: the budget cannot be met.
            RuntimeError: outside the `with` block.
        """
        self._start("remember", prompt)
        return remembered(self.setup, self._current, prompt, samples, places)

    @torch.inference_mode()
    def denoise_behind(
        self, held: CachedPrompt, answer: Answering, samples: Sequence[str], budget: Budget
    ) -> tuple[Tensor, tuple[Record, ...]]:
        """Run one step of the answer's places against a cached prompt; arguments and result as of `denoise`.

        A method that merges entries does so by this step's deciders; what any other kept, it kept in the prompt's run.
        """
        adapter, count = self.adapter, answer.ids.shape[1]
        words = adapter.model.get_input_embeddings()(answer.ids)
        merging, depth = self._merging(held, answer, budget), len(adapter.decoder.layers)
        if merging is None or merging.idle:
            states, used = run_behind(self.setup, held, held.stages, held.cache, words), depth
        else:
            with AttentionTap([merging.watched]):
                states = run_behind(self.setup, held, merging.stages(), merging.cache(), words)
            used = merging.behind
        held.cache.cut(count, used)
        logits: Tensor = adapter.model.get_output_embeddings()(states)
        _check_finite(logits, samples, answer.step)
        return logits, held.step_records() if merging is None else merging.records()

    def _merging(self, held: CachedPrompt, answer: Answering, budget: Budget) -> Merging | None:
        """Return what a step merges; None where the method never does."""
        method, facts, layout = self.setup.method, self.adapter.facts, held.layout
        if as_denoiser(method) is None or not self.setup.sites:
            return None
        rows = zip(layout.counts, layout.text, strict=True)
        keep = [budget.keep(method, facts, n, text)[0] if n else 0 for n, text in rows]
        return Merging(self.setup, held, answer.deciders, keep)


def _check_finite(logits: Tensor, samples: Sequence[str], step: int) -> None:
    odd = (~logits.sum((1, 2), dtype=torch.float32).isfinite()).tolist()
    for sample, bad in zip(samples, odd, strict=True):
        if bad:
            raise NonFiniteLogits(sample, step)
