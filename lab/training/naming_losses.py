"""Naming losses: visual tokens name their content, time and starting event; words name their attention targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from espalier.harness.seedling.scenes import COLOUR_NAMES, SHAPES
from espalier.harness.seedling.video.events import FIRST_TIME, MOST_FRAMES, TOKEN_ID
from lab.training.clip_features import ACTS, ClipTokens, ShownTokens
from lab.training.video_labels import PARTS
from lab.training.video_model import FRAME_TOKENS
from lab.training.video_packs import Read

WIDTH_OF_TEXT = 192
_LOOKS = [TOKEN_ID[word] for word in (*map(str, range(10)), *SHAPES)]
_COLOURS = [TOKEN_ID[word] for word in COLOUR_NAMES]
_ACTS = [TOKEN_ID[word] for word in ACTS]

LAST = ("since", "since_digit")
"""Heads that name the time of the previous event and digit."""


def labels_of(clips: Sequence[ClipTokens], shown_tokens: ShownTokens) -> dict[str, torch.Tensor]:
    """Returns the labels ``(B, V)`` of the tokens shown by name: those of :class:`Seen` and "frame".

    Frames are counted from the start of the longer video that contains the clips.
    """
    labels = {
        name: shown_tokens.labels([getattr(clip, name) for clip in clips])
        for name in ("kind", "colour", "act", "owner", "was_kind", "was_colour")
    }
    for name in LAST:
        since = shown_tokens.labels([getattr(clip, name) for clip in clips])
        labels[name] = torch.where(since >= 0, since + shown_tokens.first, -1)
    labels["frame"] = torch.from_numpy(shown_tokens.chosen // FRAME_TOKENS + shown_tokens.first)
    return labels


class Namers(nn.Module):
    """Predicts content, time and starting event from visual tokens, and attention targets from words.

    Predictions use the word embeddings, each with a learned scale; the object before an event, and the times
    of the previous event and digit, are read through separate matrices, so a token can encode both its former
    and its present content. This replaces the language alignment of a pretrained tower, and the time that
    positions alone do not provide.

    Words of answers name the last mentioned time and the parts of the event in question, through separate matrices,
    because a word must encode what it searches for.
    """

    def __init__(self) -> None:
        """Starts with scale 1 for each, the identity, and directions apart from those of a token's own time."""
        super().__init__()
        self.gain = nn.Parameter(torch.ones(5))
        self.before = nn.Parameter(torch.eye(WIDTH_OF_TEXT))
        self.asked_gain = nn.Parameter(torch.ones(1 + len(PARTS)))
        for name in (*LAST, "last", *PARTS):
            direction = nn.init.orthogonal_(torch.empty(WIDTH_OF_TEXT, WIDTH_OF_TEXT))
            self.register_parameter(name, nn.Parameter(direction))

    def losses(
        self,
        model: Any,
        read: Read,
        layers: dict[str, int],
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Returns the loss terms "look", "time", "act" and "before", and the others listed in `layers`.

        Args:
            model: The video model.
            read: The model's output for the batch.
            layers: Numbers of layers after which all terms except "look" and "before" are computed.
            labels: Labels of the tokens shown, see :func:`labels_of`, and of the words, see
                :func:`~lab.training.video_labels.asked_for`.
        """
        words = model.model.language_model.embed_tokens.weight
        hidden = [layer[:, read.visual] for layer in read.layers.values()]
        kind, colour, act = labels["kind"], labels["colour"], labels["act"]
        owner, was_kind, was_colour = labels["owner"], labels["was_kind"], labels["was_colour"]
        inside, owned = kind >= 0, (owner >= 0) | (act > 0)
        look = self._unit(hidden[0][inside], 0)
        when = self._unit(hidden[layers["time"]], 1).flatten(0, 1)
        begun = self._unit(hidden[layers["act"]][owned], 2) @ words[_ACTS].T
        error = F.cross_entropy(begun, act[owned], reduction="none")
        worth = torch.where(act[owned] > 0, 4.0, 1.0)
        events = act > 0
        was = self._unit(hidden[layers["act"]][events], 2) @ self.before
        count = events.sum().clamp(min=1)
        times = words[FIRST_TIME : FIRST_TIME + MOST_FRAMES]
        terms = {
            "look": F.cross_entropy(look @ words[_LOOKS].T, kind[inside])
            + F.cross_entropy(look @ words[_COLOURS].T, colour[inside]),
            "time": F.cross_entropy(when @ times.T, labels["frame"].flatten()),
            "act": (error * worth).sum() / worth.sum(),
            # A short clip may have no token with an event.
            "before": (
                F.cross_entropy(was @ words[_LOOKS].T, was_kind[events], reduction="sum")
                + F.cross_entropy(was @ words[_COLOURS].T, was_colour[events], reduction="sum")
            )
            / count,
        }
        for number, name in enumerate(LAST, start=3):
            if name in layers:
                since, named = labels[name], labels[name] >= 0
                rows = self._unit(hidden[layers[name]][named], number)
                last = rows @ self.get_parameter(name) @ times.T
                error = F.cross_entropy(last, since[named], reduction="sum")
                terms[name] = error / named.sum().clamp(min=1)
        if "last" in layers:
            states = read.layers[layers["last"]][:, read.prefix :]
            terms["last"] = self._sought(words, states, labels["last"][..., None], ("last",), 0)
        if "asked" in layers:
            states = read.layers[layers["asked"]][:, read.prefix :]
            terms["asked"] = self._sought(words, states, labels["asked"], PARTS, 1)
        return terms

    def _sought(
        self,
        words: torch.Tensor,
        states: torch.Tensor,
        wanted: torch.Tensor,
        parts: Sequence[str],
        first: int,
    ) -> torch.Tensor:
        """Returns the naming loss of words: the mean of each of P parts, summed.

        Args:
            words: Embeddings ``(W, D)``.
            states: Hidden states of the dialogue words ``(B, L, D)``.
            wanted: Numbers of the words to name, -1 for none ``(B, L, P)``.
            parts: Names of the matrices.
            first: Number of the first one's gain.
        """
        losses = []
        for slot, part in enumerate(parts):
            wanted_here = wanted[..., slot] >= 0
            rows = F.rms_norm(states[wanted_here], states.shape[-1:], eps=1e-6)
            scores = self.asked_gain[first + slot] * rows @ self.get_parameter(part) @ words.T
            error = F.cross_entropy(scores, wanted[..., slot][wanted_here], reduction="sum")
            losses.append(error / wanted_here.sum().clamp(min=1))
        return torch.stack(losses).sum()

    def _unit(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        return self.gain[number] * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
