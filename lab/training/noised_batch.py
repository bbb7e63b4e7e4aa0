"""Masked denoising: noised dialogues, their attention masks, and the loss.

An answer has a fixed number of positions, padded with ``<eos>``. Each position is replaced by the mask
token with probability t ~ U(0, 1), and the model predicts the original: the logits of position i are for
token i. A position's loss is divided by t, which bounds the likelihood of the whole answer (LLaDA, "Large
Language Diffusion Models", section 2.2).

Dialogues are arranged in two ways. *Packed*: all dialogues of an image share it, and the image sees itself
only. *Alone*: one dialogue per row, which the image sees. In both, the prompt of a dialogue either sees its
answer (full attention, as in LLaDA-V) or does not (the prefix mask of LaViDa, with which the keys and
values of a prompt are valid for all steps); the answer sees everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.seedling.vocabulary import ASSISTANT, EOS, MASK, PAD, encode
from lab.training.dialogue_packs import IGNORE, PREFIX, TEXT_START
from lab.training.fast_math import attend, use_attention

ATTENTION = "seedling_denoising"


@dataclass
class Noised:
    """B rows of L text tokens with masked answers.

    Attributes:
        tokens: Input ids ``(B, L)``.
        targets: The masked words, -100 elsewhere ``(B, L)``.
        weights: Loss weight of each position of an answer, masked or not; 0 elsewhere ``(B, L)``.
        shares: Mask probability at each position of an answer; 1 elsewhere ``(B, L)``.
        positions: Position ids ``(B, L)``.
        segments: Number of the dialogue, -1 on padding ``(B, L)``.
        answers: Whether a position belongs to an answer ``(B, L)``.
        opened: Whether the prompt of the position's dialogue sees the answer ``(B, L)``.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    shares: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    answers: torch.Tensor
    opened: torch.Tensor

    def visible(self, prefix: int, single: bool) -> torch.Tensor:
        """Returns the visible keys of each query; the first ``prefix`` keys are BOS, ``USER:`` and the image.

        Returns:
            Booleans ``(B, prefix + L, prefix + L)`` where the image sees its dialogue (``single``), and
            ``(B, L, prefix + L)``, the text's queries, where it sees itself only.
        """
        together = self.segments[:, :, None] == self.segments[:, None, :]
        ahead = ~self.answers[:, :, None] & self.answers[:, None, :] & ~self.opened[:, :, None]
        text = F.pad(together & ~ahead, (prefix, 0), value=True)
        if not single:
            return text
        visible = (self.segments >= 0) & (~self.answers | self.opened)
        image = F.pad(visible, (prefix, 0), value=True)[:, None].expand(-1, prefix, -1)
        return torch.cat([image, text], dim=1)


def stratified_shares(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws ``count`` shares, each U(0, 1) marginally, one from each of ``count`` equal slices."""
    shares: np.ndarray = (rng.permutation(count) + rng.random()) / count
    return shares


def noise(
    rows: Sequence[Sequence[SceneQuestion]], plan: dict[str, Any], rng: np.random.Generator
) -> Noised:
    """Lays out dialogues in rows and masks part of each answer.

    Args:
        rows: The dialogues of each row.
        plan: "rooms" (answer lengths by family), "weights" (loss weights of words by family, and of
            "end") and "opened" (share of dialogues in which the prompt sees the answer).
        rng: Source of rooms, shares, masks and visibility.

    Returns:
        The batch; L is a multiple of 8.
    """
    shares = iter(stratified_shares(sum(map(len, rows)), rng))
    laid = [[_noised(question, float(next(shares)), plan, rng) for question in row] for row in rows]
    longest = max(sum(dialogue.tokens.shape[1] for dialogue in row) for row in laid)
    length = -(-longest // 8) * 8
    return _stacked([_row(row, length) for row in laid])


def _noised(
    question: SceneQuestion, share: float, plan: dict[str, Any], rng: np.random.Generator
) -> Noised:
    question_ids, words = [*encode(question.text), ASSISTANT], encode(question.answer)
    rooms = [room for room in plan["rooms"][question.family] if room >= len(words)]
    room = int(rng.choice(rooms))
    silent, weight = len(question_ids), plan["weights"][question.family]
    clean = torch.tensor([*question_ids, *words, *[EOS] * (room - len(words))])
    answers = torch.arange(silent + room) >= silent
    hidden = answers & torch.from_numpy(rng.random(silent + room) < share)
    weights = torch.where(clean == EOS, weight * plan["weights"]["end"], weight)
    dialogue = Noised(
        tokens=clean.masked_fill(hidden, MASK),
        targets=clean.masked_fill(~hidden, IGNORE),
        weights=weights * answers,
        shares=torch.where(answers, share, 1.0),
        positions=torch.arange(TEXT_START, TEXT_START + silent + room),
        segments=torch.zeros(silent + room, dtype=torch.long),
        answers=answers,
        opened=torch.full((silent + room,), bool(rng.random() < plan["opened"])),
    )
    return _stacked([dialogue])


EMPTY = Noised(*map(torch.tensor, (PAD, IGNORE, 0.0, 1.0, 0, -1, False, False)))
"""Padding after the last dialogue of a row."""


def _row(dialogues: Sequence[Noised], length: int) -> Noised:
    parts = {}
    for field in fields(Noised):
        row = torch.cat([getattr(dialogue, field.name)[0] for dialogue in dialogues])
        if field.name == "segments":
            lengths = torch.tensor([dialogue.tokens.shape[1] for dialogue in dialogues])
            row = torch.arange(len(dialogues)).repeat_interleave(lengths)
        parts[field.name] = F.pad(row, (0, length - len(row)), value=getattr(EMPTY, field.name))
    return Noised(**parts)


def _stacked(rows: Sequence[Noised]) -> Noised:
    names = [field.name for field in fields(Noised)]
    return Noised(**{name: torch.stack([getattr(row, name) for row in rows]) for name in names})


def denoising_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends with the mask ``(B, 1, Q, S)``; queries before the last Q see only one another.

    Shapes are ``(B, heads, S, head_dim)``.
    """
    prefix = attention_mask.shape[-1] - attention_mask.shape[-2]
    masked = attend(query[:, :, prefix:], key, value, attention_mask, scaling)
    if prefix:
        query, key, value = (part[:, :, :prefix] for part in (query, key, value))
        masked = torch.cat([attend(query, key, value, None, scaling), masked], dim=2)
    return masked.transpose(1, 2).contiguous(), None


def use_denoising_attention(language_model: nn.Module) -> None:
    """Switches a Llama text stack to :func:`denoising_attention`."""
    use_attention(language_model, ATTENTION, denoising_attention)


def text_hidden(
    model: Any,
    visual: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    visible: torch.Tensor,
    visual_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs the language model over image and text.

    Args:
        model: A LLaVA model with :func:`denoising_attention` in its text stack.
        visual: Projected visual tokens ``(B, V, D)``, perhaps a subset.
        tokens: Text tokens ``(B, L)``.
        positions: Their position ids ``(B, L)``.
        visible: See :meth:`Noised.visible`.
        visual_positions: Position ids ``(B, V)`` of a subset; None means all tokens in order.

    Returns:
        Hidden states of the text ``(B, L, D)``.
    """
    language = model.model.language_model
    batch = visual.shape[0]
    if visual_positions is None:
        visual_positions = torch.arange(len(PREFIX), TEXT_START).expand(batch, -1)
    start = torch.tensor(PREFIX).expand(batch, -1)
    first = torch.arange(len(PREFIX)).expand(batch, -1)
    words = language.embed_tokens(torch.cat([start, tokens], dim=1))
    parts = [words[:, : len(PREFIX)], visual, words[:, len(PREFIX) :]]
    hidden: torch.Tensor = language(
        inputs_embeds=torch.cat(parts, dim=1),
        attention_mask=torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None],
        position_ids=torch.cat([first, visual_positions, positions], dim=1),
        use_cache=False,
    ).last_hidden_state
    return hidden[:, -tokens.shape[1] :]


def denoising_loss(logits: torch.Tensor, batch: Noised, clip: float) -> torch.Tensor:
    """Sums the weighted cross-entropy of masked positions, each divided by its mask probability.

    Its expectation equals the bound, except for shares below ``clip``; divided by the sum of
    ``batch.weights`` it is a mean over positions.

    Args:
        logits: ``(T, vocabulary)`` of the T masked positions, in batch order.
        batch: The noised dialogues.
        clip: Smallest share to divide by.
    """
    masked = batch.targets != IGNORE
    error = F.cross_entropy(without_mask(logits), batch.targets[masked], reduction="none")
    return (error * batch.weights[masked] / batch.shares[masked].clamp(min=clip)).sum()


def without_mask(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits that exclude the mask token, which is never part of an answer."""
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool)
    banned[MASK] = True
    return logits.masked_fill(banned, float("-inf"))
