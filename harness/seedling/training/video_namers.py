"""Losses on visual tokens: each names what it is, when it is shown, what begins there and with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness.seedling.scenes import COLOUR_NAMES
from harness.seedling.sprites import SHAPES
from harness.seedling.training.video import ACTS, Seen, Shown
from harness.seedling.training.video_packing import Read
from harness.seedling.video.vocabulary import FIRST_TIME, MOST_FRAMES, TOKEN_ID
from harness.seedling.video_model import FRAME_TOKENS

WIDTH_OF_TEXT = 192
_LOOKS = [TOKEN_ID[word] for word in (*map(str, range(10)), *SHAPES)]
_COLOURS = [TOKEN_ID[word] for word in COLOUR_NAMES]
_ACTS = [TOKEN_ID[word] for word in ACTS]


class Namers(nn.Module):
    """Asks visual tokens to name what they are, when they are shown and what begins there.

    They name with the word embeddings, each of the four by a learned scale; an object as it was before an
    event, and the time of the event before that, are read through matrices of their own, so that a token can say
    what it was and what it is. This stands in for the language alignment a tower would bring along, and for the
    time that positions alone do not say.
    """

    def __init__(self) -> None:
        """Starts with scale 1 for each, the identity, and directions apart from those of a token's own time."""
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.before = nn.Parameter(torch.eye(WIDTH_OF_TEXT))
        self.since = nn.Parameter(nn.init.orthogonal_(torch.empty(WIDTH_OF_TEXT, WIDTH_OF_TEXT)))

    def losses(
        self,
        model: Any,
        read: Read,
        layers: dict[str, int],
        seen: Sequence[Seen],
        shown: Shown,
    ) -> dict[str, torch.Tensor]:
        """Returns the loss terms "look", "time", "act" and "before", and "since" where `layers` has it.

        Args:
            model: The video model.
            read: What it made of the batch.
            layers: Behind how many layers "time", "act" and "since" are named.
            seen: The clips.
            shown: The tokens shown.
        """
        words = model.model.language_model.embed_tokens.weight
        hidden = [layer[:, read.visual] for layer in read.layers]
        kind, colour, act, owner, was_kind, was_colour, since = (
            shown.labels([getattr(one, name) for one in seen])
            for name in ("kind", "colour", "act", "owner", "was_kind", "was_colour", "since")
        )
        inside, owned = kind >= 0, (owner >= 0) | (act > 0)
        look = self._unit(hidden[0][inside], 0)
        when = self._unit(hidden[layers["time"]], 1).flatten(0, 1)
        frame = torch.from_numpy(shown.chosen // FRAME_TOKENS + shown.first).flatten()
        begun = self._unit(hidden[layers["act"]][owned], 2) @ words[_ACTS].T
        error = F.cross_entropy(begun, act[owned], reduction="none")
        worth = torch.where(act[owned] > 0, 4.0, 1.0)
        events = act > 0
        was = self._unit(hidden[layers["act"]][events], 2) @ self.before
        count = max(int(events.sum()), 1)
        times = words[FIRST_TIME : FIRST_TIME + MOST_FRAMES]
        found = {
            "look": F.cross_entropy(look @ words[_LOOKS].T, kind[inside])
            + F.cross_entropy(look @ words[_COLOURS].T, colour[inside]),
            "time": F.cross_entropy(when @ times.T, frame),
            "act": (error * worth).sum() / worth.sum(),
            # A short clip may show no token of any event.
            "before": (
                F.cross_entropy(was @ words[_LOOKS].T, was_kind[events], reduction="sum")
                + F.cross_entropy(was @ words[_COLOURS].T, was_colour[events], reduction="sum")
            )
            / count,
        }
        if "since" in layers:
            last = self._unit(hidden[layers["since"]][events], 3) @ self.since @ times.T
            error = F.cross_entropy(last, since[events] + shown.first, reduction="sum")
            found["since"] = error / count
        return found

    def _unit(self, rows: torch.Tensor, which: int) -> torch.Tensor:
        return self.gain[which] * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
