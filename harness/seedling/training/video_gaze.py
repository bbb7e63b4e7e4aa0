"""A loss on attention: a word of an answer looks at the visual tokens that show what it tells.

Answers are looked up among thousands of tokens. A head that looks at all of them alike learns from the answer alone
only after it has hit the right ones by chance for long; told where to look it learns in a fraction of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from harness.seedling.training.packing import IGNORE, Packed
from harness.seedling.training.video import Seen, Shown
from harness.seedling.training.video_drills import Talk
from harness.seedling.training.video_packing import Read
from harness.seedling.video.story import STRIDE
from harness.seedling.video_model import FRAME_TOKENS

_BARE = frozenset(["at", "time", "the", "a", "with", "from", "to", "there", ";", "is"])
"""Words of captions that show nothing."""


def shown_by(talk: Talk) -> list[tuple[int, int] | None]:
    """Returns (frame, track) of what each word of an answer tells; None where it tells nothing to be seen."""
    words = talk.answer.split()
    if talk.family == "caption":
        return [
            what for one in zip(_sentences(words), talk.shows, strict=True) for what in _told(*one)
        ]
    if talk.family == "digits":
        return [what for what in talk.shows for _ in ("time", "digit")]
    return [talk.shows[0] if talk.shows else None] * len(words)


def _sentences(words: Sequence[str]) -> list[list[str]]:
    ends = [place + 1 for place, word in enumerate(words) if word == ";"]
    return [list(words[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _told(words: Sequence[str], shown: tuple[int, int]) -> list[tuple[int, int] | None]:
    """Returns what `shown_by` does, of one sentence; where a move leads is seen at its end."""
    frame, track = shown
    goal = words.index("to") if "moves" in words else len(words)
    return [
        None if word in _BARE else (frame + (STRIDE - 1) * (place > goal), track)
        for place, word in enumerate(words)
    ]


def tokens_of(one: Seen, chosen: np.ndarray, frame: int, track: int) -> np.ndarray:
    """Returns which of the shown tokens ``(V,)`` show an object in a frame, or where it was if it has just gone."""
    here: np.ndarray = chosen // FRAME_TOKENS == frame
    owned: np.ndarray = here & (one.owner[chosen] == track)
    begun: np.ndarray = here & (one.act[chosen] > 0)
    return owned if owned.any() else begun


def evidence(
    talks: Sequence[Sequence[Talk]], packed: Packed, seen: Sequence[Seen], shown: Shown
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows that predict a word which some shown token shows, and those tokens.

    Args:
        talks: Per clip.
        packed: The same, packed.
        seen: The clips.
        shown: The tokens shown.

    Returns:
        Clip and place of each of R rows ``(R, 2)``, and the tokens ``(R, V)``, boolean.
    """
    rows, masks = [], []
    for line, items in enumerate(talks):
        known: dict[tuple[int, int], np.ndarray] = {}
        segments, labels = packed.segments[line].numpy(), packed.labels[line].numpy()
        for number, talk in enumerate(items):
            places = np.flatnonzero((segments == number) & (labels != IGNORE))
            # Behind the answer its end is predicted, except in drills.
            for place, what in zip(places.tolist(), shown_by(talk), strict=False):
                if what is None:
                    continue
                if what not in known:
                    known[what] = tokens_of(seen[line], shown.chosen[line], *what)
                if known[what].any():
                    rows.append((line, place))
                    masks.append(known[what])
    tokens = np.array(masks, bool).reshape(len(rows), shown.chosen.shape[1])
    return torch.tensor(rows, dtype=torch.long).reshape(-1, 2), torch.from_numpy(tokens)


def gaze_loss(
    model: Any, read: Read, layer: int, heads: int, rows: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Returns the mean of -log of the attention that the right tokens get together.

    Args:
        model: The video model.
        read: What it made of the batch.
        layer: Number of the layer that looks.
        heads: How many of its heads, from the first on.
        rows: As :func:`evidence` returns them ``(R, 2)``.
        tokens: The right tokens of each row ``(R, V)``.
    """
    language = model.model.language_model
    block = language.layers[layer]
    attention, hidden = block.self_attn, block.input_layernorm(read.layers[layer])
    length = read.words.shape[1]
    width = heads * attention.head_dim
    cos, sin = language.rotary_emb(hidden, read.positions)

    def rotary(projection: Any, states: torch.Tensor, lines: Any) -> torch.Tensor:
        found = torch.nn.functional.linear(
            states, projection.weight[:width], projection.bias[:width]
        )
        found = found.unflatten(-1, (heads, attention.head_dim))
        low, high = found.chunk(2, dim=-1)
        rotated = torch.cat([-high, low], dim=-1)
        turned: torch.Tensor = found * cos[lines][..., None, :] + rotated * sin[lines][..., None, :]
        return turned

    losses = []
    for line in range(len(hidden)):
        mine = rows[:, 0] == line
        places = rows[mine, 1] + hidden.shape[1] - length
        queries = rotary(attention.q_proj, hidden[line, places], (line, places))
        keys = rotary(attention.k_proj, hidden[line], (line, slice(None)))
        scores = torch.einsum("rhd,shd->hrs", queries, keys) * attention.scaling
        scores = scores + read.mask[line, 0, rows[mine, 1]]
        right = scores[..., read.visual].masked_fill(~tokens[mine], float("-inf"))
        losses.append(scores.logsumexp(-1) - right.logsumexp(-1))
    return torch.cat(losses, dim=1).mean()
