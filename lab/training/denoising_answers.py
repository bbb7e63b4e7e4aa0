"""Answers of a model trained by denoising, all positions at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from espalier.harness.seedling.vocabulary import EOS, MASK, VOCABULARY
from lab.training.dialogue_packs import PREFIX, TEXT_START
from lab.training.noised_batch import Noised, text_hidden, without_mask


@dataclass(frozen=True)
class Sampler:
    """Unmasks the most confident positions, step by step (low-confidence remasking).

    Slow and simple: every step runs the whole prompt again.

    Attributes:
        steps_per_token: Steps per position of an answer; 0.5 unmasks two positions per step.
        single: Whether the image sees question and answer, see :mod:`~lab.training.noised_batch`.
        opened: Whether the prompt sees the answer.
    """

    steps_per_token: float = 0.5
    single: bool = True
    opened: bool = True

    @torch.no_grad()
    def decode(
        self,
        model: Any,
        visual: torch.Tensor,
        positions: torch.Tensor,
        questions: torch.Tensor,
        room: int,
    ) -> list[str]:
        """Answers questions of equal length.

        Args:
            model: A LLaVA model with denoising attention in its text stack.
            visual: Projected visual tokens ``(B, V, D)``.
            positions: Their position ids ``(B, V)``.
            questions: Question ids ending in ``ASSISTANT:`` ``(B, Q)``.
            room: Positions of an answer.

        Returns:
            The answers as words, up to the first ``<eos>``.
        """
        start = questions.shape[1]
        batch = _all_masked(questions, room, self.opened)
        visible = batch.visible(len(PREFIX) + visual.shape[1], self.single)
        tokens = batch.tokens
        for count in reveals(room, max(1, round(self.steps_per_token * room))):
            hidden = text_hidden(model, visual, tokens, batch.positions, visible, positions)
            shares = without_mask(model.lm_head(hidden[:, start:])).softmax(-1)
            sure, words = shares.max(-1)
            masked = tokens[:, start:] == MASK
            best = sure.masked_fill(~masked, -1.0).topk(count, dim=1).indices
            tokens[:, start:].scatter_(1, best, words.gather(1, best))
        return [_words(row) for row in tokens[:, start:].tolist()]


def reveals(room: int, steps: int) -> list[int]:
    """Returns the number of positions unmasked per step: equal, with one more in the first steps."""
    return [room // steps + (number < room % steps) for number in range(steps)]


def _all_masked(questions: torch.Tensor, room: int, opened: bool) -> Noised:
    rows, start = questions.shape
    shape = (rows, start + room)
    answers = (torch.arange(start + room) >= start).expand(shape)
    return Noised(
        tokens=torch.cat([questions, torch.full((rows, room), MASK)], dim=1),
        targets=torch.zeros(shape, dtype=torch.long),
        weights=torch.ones(shape),
        shares=torch.ones(shape),
        positions=torch.arange(TEXT_START, TEXT_START + start + room).expand(shape),
        segments=torch.zeros(shape, dtype=torch.long),
        answers=answers,
        opened=torch.full(shape, opened),
    )


def _words(row: list[int]) -> str:
    end = row.index(EOS) if EOS in row else len(row)
    return " ".join(VOCABULARY[token] for token in row[:end])
