"""Denoising steps: prompt and answer, masks and words, run through the decoder stack together, without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.budget import Budget
from harness.engine.finite import NonFiniteLogits
from harness.engine.passes import Pass
from harness.engine.positions import closed
from harness.engine.prompt import Prompt
from harness.engine.record import Record
from harness.engine.session import Session
from harness.engine.signals.deciders import DECIDERS


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


def _check_finite(logits: Tensor, samples: Sequence[str], step: int) -> None:
    odd = (~logits.sum((1, 2), dtype=torch.float32).isfinite()).tolist()
    for sample, bad in zip(samples, odd, strict=True):
        if bad:
            raise NonFiniteLogits(sample, step)
