"""Packs many short dialogues about one image into one sequence.

All dialogues share the image prefix ``<bos> USER: <image>``. A block mask lets each see the prefix
and itself only, and its positions restart after the full prefix, so the result equals running every
dialogue as its own prompt, at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.seedling.vocabulary import ASSISTANT, BOS, EOS, PAD, USER, encode
from lab.training.drills import Drill
from lab.training.fast_math import attend, use_attention
from lab.training.seedling_model import VISUAL_TOKENS

PREFIX = (BOS, USER)
TEXT_START = len(PREFIX) + VISUAL_TOKENS
"""Position of the first word after the image, independent of the number of visual tokens kept."""

ATTENTION = "seedling_packed"
IGNORE = -100


@dataclass
class Packed:
    """B packed rows of L text tokens.

    Attributes:
        tokens: Input ids ``(B, L)``.
        labels: Next-token targets, -100 where there is no loss ``(B, L)``.
        weights: Loss weight of each label ``(B, L)``.
        positions: Position ids ``(B, L)``.
        segments: Number of the dialogue, -1 on padding ``(B, L)``.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor

    def to(self, device: torch.device | str) -> Packed:
        """Returns the same on a device."""
        return Packed(*(getattr(self, field.name).to(device) for field in fields(self)))

    def mask(self, prefix: int) -> torch.Tensor:
        """Returns the additive text-row mask ``(B, 1, L, prefix + L)`` for a prefix length."""
        length, device = self.segments.shape[1], self.segments.device
        together = self.segments[:, :, None] == self.segments[:, None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        text = torch.zeros(together.shape, device=device)
        text.masked_fill_(~(together & causal), float("-inf"))
        return F.pad(text, (prefix, 0))[:, None]


@dataclass
class _DialogueRow:
    tokens: list[int]
    labels: list[int]
    weights: list[float]


Encode = Callable[[str], list[int]]


@lru_cache(maxsize=20000)
def _encoded(text: str, encoding: Encode) -> tuple[int, ...]:
    return tuple(encoding(text))


def _question_row(
    question: SceneQuestion, weight: float, end_weight: float, encoding: Encode
) -> _DialogueRow:
    question_ids, answer = list(_encoded(question.text, encoding)), encoding(question.answer)
    silent = len(question_ids)
    return _DialogueRow(
        tokens=[*question_ids, ASSISTANT, *answer],
        labels=[IGNORE] * silent + [*answer, EOS],
        weights=[0.0] * silent + [weight] * len(answer) + [weight * end_weight],
    )


def _drill_row(drill: Drill, first: float, later: float) -> _DialogueRow:
    words = encode(f"{drill.key} {drill.continuation}")
    labels = words[1:]
    weights = [first] * min(len(labels), 2) + [later] * max(len(labels) - 2, 0)
    return _DialogueRow(words[:-1], labels, weights)


def pack(
    dialogues: Sequence[Sequence[SceneQuestion | Drill]],
    weights: dict[str, float],
    text_start: int = TEXT_START,
    encoding: Encode = encode,
) -> Packed:
    """Packs the dialogues of B images.

    Args:
        dialogues: Questions and drills per image.
        weights: Loss weight per family, and of "drill", "drill_later" and "end".
        text_start: Position of the first word of every dialogue.
        encoding: Returns the token ids of a question or an answer.

    Returns:
        The padded batch; L is a multiple of 8.
    """
    packed_rows = [[_row(item, weights, encoding) for item in items] for items in dialogues]
    longest = max(sum(len(row.tokens) for row in rows) for rows in packed_rows)
    shape = (len(packed_rows), -(-longest // 8) * 8)
    tokens, labels = np.full(shape, PAD), np.full(shape, IGNORE)
    loss_weights = np.zeros(shape, np.float32)
    positions, segments = np.zeros(shape, np.int64), np.full(shape, -1)
    for line, rows in enumerate(packed_rows):
        start = 0
        for number, row in enumerate(rows):
            span = slice(start, start + len(row.tokens))
            tokens[line, span], labels[line, span] = row.tokens, row.labels
            loss_weights[line, span] = row.weights
            positions[line, span] = np.arange(text_start, text_start + len(row.tokens))
            segments[line, span] = number
            start = span.stop
    arrays = (tokens, labels, loss_weights, positions, segments)
    return Packed(*(torch.from_numpy(array) for array in arrays))


def _row(item: SceneQuestion | Drill, weights: dict[str, float], encoding: Encode) -> _DialogueRow:
    if isinstance(item, Drill):
        return _drill_row(item, weights["drill"], weights["drill_later"])
    return _question_row(item, weights[item.family], weights["end"], encoding)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends causally inside the prefix, then lets the text rows see prefix and own dialogue.

    Two calls skip the mask for the prefix and the text columns for prefix rows. Shapes are
    ``(B, heads, S, head_dim)``; the prefix length follows from the mask ``(B, 1, L, S)``.
    """
    prefix = attention_mask.shape[-1] - attention_mask.shape[-2]
    causal = torch.full((prefix, prefix), float("-inf")).triu_(1)
    image = attend(query[:, :, :prefix], key[:, :, :prefix], value[:, :, :prefix], causal, scaling)
    text = attend(query[:, :, prefix:], key, value, attention_mask, scaling)
    return torch.cat([image, text], dim=2).transpose(1, 2).contiguous(), None


def use_packed_attention(language_model: nn.Module) -> None:
    """Switches a Llama text stack to :func:`packed_attention`."""
    use_attention(language_model, ATTENTION, packed_attention)


def packed_hidden(
    model: Any,
    visual: torch.Tensor,
    packed: Packed,
    visual_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs the language model over a packed batch.

    Args:
        model: A LLaVA model with packed attention in its text stack.
        visual: Projected visual tokens ``(B, V, D)``, perhaps a subset.
        packed: The text.
        visual_positions: Position ids ``(B, V)`` of a subset; None means all tokens in order.

    Returns:
        Hidden states of the text rows ``(B, L, D)``.
    """
    language = model.model.language_model
    batch = visual.shape[0]
    start = language.embed_tokens(torch.tensor(PREFIX)).expand(batch, -1, -1)
    if visual_positions is None:
        visual_positions = torch.arange(len(PREFIX), TEXT_START).expand(batch, -1)
    prefix = len(PREFIX) + visual.shape[1]
    first = torch.arange(len(PREFIX)).expand(batch, -1)
    hidden: torch.Tensor = language(
        inputs_embeds=torch.cat([start, visual, language.embed_tokens(packed.tokens)], dim=1),
        attention_mask=packed.mask(prefix),
        position_ids=torch.cat([first, visual_positions, packed.positions], dim=1),
        use_cache=False,
    ).last_hidden_state
    return hidden[:, prefix:]
