"""Packs the dialogues about a clip into one row, and runs the text stack over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from espalier.harness.seedling.video.events import FIRST_TIME, MOST_FRAMES, encode
from espalier.harness.seedling.vocabulary import ASSISTANT, EOS, PAD
from lab.training.clip_features import ShownTokens
from lab.training.dialogue_packs import IGNORE, PREFIX, Packed
from lab.training.parted_attention import DialogueGroup, attend_in_parts, groups_of
from lab.training.video_drills import Talk

ATTENTION = "seedling_video_packed"
_TIMES = range(FIRST_TIME, FIRST_TIME + MOST_FRAMES)


def pack_talks(
    talks: Sequence[Sequence[Talk]], weights: dict[str, float], shown_tokens: ShownTokens
) -> Packed:
    """Packs the dialogues of B clips; each sees its clip and itself.

    Args:
        talks: Per clip.
        weights: Loss weight per family, of "end", and of "soon": times at most one frame after the
            previous time.
        shown_tokens: Gives the start of the text and the shift of times.
    """
    rows = [[_row(talk, weights, shown_tokens.first) for talk in items] for items in talks]
    longest = max(sum(len(tokens) for tokens, _, _ in items) for items in rows)
    shape = (len(rows), -(-longest // 8) * 8)
    tokens, labels = np.full(shape, PAD), np.full(shape, IGNORE)
    loss_weights = np.zeros(shape, np.float32)
    positions, segments = np.zeros(shape, np.int64), np.full(shape, -1)
    for line, items in enumerate(rows):
        start = 0
        for number, (words, wanted, worth) in enumerate(items):
            span = slice(start, start + len(words))
            tokens[line, span], labels[line, span], loss_weights[line, span] = words, wanted, worth
            positions[line, span] = shown_tokens.end + 1 + np.arange(len(words))
            segments[line, span] = number
            start = span.stop
    arrays = (tokens, labels, loss_weights, positions, segments)
    return Packed(*(torch.from_numpy(array) for array in arrays))


def _row(
    talk: Talk, weights: dict[str, float], first: int
) -> tuple[list[int], list[int], list[float]]:
    """Returns tokens, labels and weights of one dialogue, its times shifted by `first` frames."""
    texts = (talk.question, talk.beginning, talk.answer)
    question, beginning, answer = (_later(encode(text), first) for text in texts)
    weight = weights[talk.family]
    if talk.family == "drill":
        words = [*question, *answer]
        silent = len(question) - 1
        return words[:-1], [IGNORE] * silent + answer, [0.0] * silent + [weight] * len(answer)
    silent = len(question) + len(beginning)
    worth = [weight] * len(answer)
    if talk.family in ("caption", "digits"):
        for place in _soon(beginning, answer):
            worth[place] *= weights.get("soon", 1.0)
    return (
        [*question, ASSISTANT, *beginning, *answer],
        [IGNORE] * silent + [*answer, EOS],
        [0.0] * silent + worth + [weight * weights["end"]],
    )


def _soon(beginning: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Returns the positions in an answer of times at most one frame after the previous time."""
    positions, last = [], None
    for place, token in enumerate([*beginning, *answer], start=-len(beginning)):
        if token in _TIMES:
            if place >= 0 and last is not None and token in (last, last + 1):
                positions.append(place)
            last = token
    return positions


def _later(tokens: list[int], frames: int) -> list[int]:
    return [token + frames if token in _TIMES else token for token in tokens]


def video_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    groups: list[DialogueGroup] | None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends causally inside the prefix, then lets the text rows see prefix and own dialogue.

    The fused kernel is two to three times as fast here as separate masked products. With `groups` the text rows
    attend in parts, which takes 60 % of the time; otherwise with the mask.
    """
    prefix = attention_mask.shape[-1] - attention_mask.shape[-2]
    attend = F.scaled_dot_product_attention
    parts = (query[:, :, :prefix], key[:, :, :prefix], value[:, :, :prefix])
    video = attend(*parts, is_causal=True, scale=scaling)
    words = query[:, :, prefix:]
    if groups is None:
        text = attend(words, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        text = attend_in_parts(words, key, value, groups, scaling)
    return torch.cat([video, text], dim=2).transpose(1, 2).contiguous(), None


@dataclass
class Read:
    """Output of the text stack for a packed batch of S tokens, with V visual tokens and L words at the end.

    Attributes:
        words: Hidden states of the words at the end ``(B, L, D)``.
        layers: Hidden states by number of layers ``(B, S, D)``.
        positions: Position ids ``(B, S)``.
        segments: Dialogue of each word ``(B, L)``.
        visual: Where the visual tokens are.
    """

    words: torch.Tensor
    layers: Mapping[int, torch.Tensor]
    positions: torch.Tensor
    segments: torch.Tensor
    visual: slice

    @property
    def prefix(self) -> int:
        """Place of the first word."""
        return self.positions.shape[1] - self.segments.shape[1]

    def bias(self, places: torch.Tensor, of_words: bool) -> torch.Tensor:
        """Returns the additive mask ``(B, R, S)`` of positions ``(B, R)``, either all words or all visual tokens."""
        size, device = self.positions.shape[1], places.device
        hidden = torch.arange(size, device=device) > places[..., None]
        if of_words:
            lines = torch.arange(len(places), device=device)[:, None]
            mine = self.segments[lines, places - self.prefix]
            hidden[..., self.prefix :] |= self.segments[:, None] != mine[..., None]
        return torch.zeros(hidden.shape, device=device).masked_fill(hidden, float("-inf"))


def video_hidden(
    model: Any, visual: torch.Tensor, shown_tokens: ShownTokens, packed: Packed
) -> Read:
    """Runs the language model over a packed batch."""
    language = model.model.language_model
    (batch, count), device = visual.shape[:2], visual.device
    start = language.embed_tokens(torch.tensor(PREFIX, device=device)).expand(batch, -1, -1)
    newline = model.model.image_newline.expand(batch, 1, -1)
    text = language.embed_tokens(packed.tokens)
    places = [
        torch.arange(len(PREFIX), device=device).expand(batch, -1),
        shown_tokens.positions.to(device),
        torch.full((batch, 1), shown_tokens.end, device=device),
        packed.positions,
    ]
    prefix = len(PREFIX) + count + 1
    positions, mask = torch.cat(places, dim=1), packed.mask(prefix)
    output = language(
        inputs_embeds=torch.cat([start, visual, newline, text], dim=1),
        attention_mask=mask,
        position_ids=positions,
        use_cache=False,
        output_hidden_states=True,
        # Only the CPU kernel that returns the LSE can be called by name.
        groups=groups_of(packed.segments) if device.type == "cpu" else None,
    )
    words = output.last_hidden_state[:, prefix:]
    visible = slice(len(PREFIX), prefix - 1)
    return Read(words, dict(enumerate(output.hidden_states)), positions, packed.segments, visible)
