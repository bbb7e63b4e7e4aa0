"""A loss on attention: a word of an answer looks at the visual tokens that show what it tells.

Answers are looked up among thousands of tokens. A head that looks at all of them alike learns from the answer alone
only after it has hit the right ones by chance for long; told where to look it learns in a fraction of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


Things = tuple[tuple[int, int], ...]
"""(frame, number of the track) of each."""


class Look(NamedTuple):
    """What the heads that look are to find for one word: the first of them, and the others.

    Attributes:
        early: In all layers that look but the last.
        late: In the last.
    """

    early: tuple[Things, Things]
    late: tuple[Things, Things]


def shown_by(talk: Talk) -> list[Look | None]:
    """Returns where to look for each word of an answer; None where it tells nothing to be seen.

    Before an order is said, its two events are looked at by a head each, so that the next layers can compare their
    times. What comes next after an event is found in two steps: first that event, then what follows it; and the next
    of the objects that are counted among all of them.
    """
    words = talk.answer.split()
    if talk.family == "caption":
        return [
            what for one in zip(_sentences(words), talk.shows, strict=True) for what in _told(*one)
        ]
    if talk.family == "digits":
        return [_same((what,)) for what in talk.shows for _ in ("time", "digit")]
    if talk.family == "order" and len(talk.shows) == 2:
        first, second = ((what,) for what in talk.shows)
        if words[-1] in ("before", "after"):
            return [_same(first), _same(second), Look((first, second), (first, second))]
        then = Look((first, first), (second, second))
        return [_same(first), then, *[_same(second)] * (len(words) - 2)]
    if talk.family == "how_many" and talk.shows:
        named = [_among((what,), talk.shows) for what in talk.shows for _ in ("colour", "thing")]
        return [*named, _same(talk.shows)]
    return [_same(talk.shows) if talk.shows else None] * len(words)


def _among(things: Things, others: Things) -> Look:
    return Look((others, things), (things, things))


def _same(things: Things) -> Look:
    return Look((things, things), (things, things))


def _sentences(words: Sequence[str]) -> list[list[str]]:
    ends = [place + 1 for place, word in enumerate(words) if word == ";"]
    return [list(words[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _told(words: Sequence[str], shown: tuple[int, int]) -> list[Look | None]:
    """Returns what `shown_by` does, of one sentence; where a move leads is seen at its end."""
    frame, track = shown
    goal = words.index("to") if "moves" in words else len(words)
    return [
        None if word in _BARE else _same(((frame + (STRIDE - 1) * (place > goal), track),))
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
        Clip and place of each of R rows ``(R, 2)``, and the tokens ``(R, 2, 2, V)``, boolean: early and late, of the
        first head and of the others.
    """
    rows, masks = [], []
    for line, items in enumerate(talks):
        known: dict[Things, np.ndarray] = {}
        segments, labels = packed.segments[line].numpy(), packed.labels[line].numpy()
        for number, talk in enumerate(items):
            places = np.flatnonzero((segments == number) & (labels != IGNORE))
            # Behind the answer its end is predicted, except in drills.
            for place, look in zip(places.tolist(), shown_by(talk), strict=False):
                if look is None:
                    continue
                wanted = [*look.early, *look.late]
                for things in wanted:
                    if things not in known:
                        known[things] = _union(seen[line], shown.chosen[line], things)
                if all(known[things].any() for things in wanted):
                    rows.append((line, place))
                    masks.append([known[things] for things in wanted])
    tokens = np.array(masks, bool).reshape(len(rows), 2, 2, shown.chosen.shape[1])
    return torch.tensor(rows, dtype=torch.long).reshape(-1, 2), torch.from_numpy(tokens)


def _union(one: Seen, chosen: np.ndarray, things: Things) -> np.ndarray:
    union: np.ndarray = np.any([tokens_of(one, chosen, *what) for what in things], axis=0)
    return union


def looking_loss(
    model: Any,
    read: Read,
    plan: dict[str, Any],
    talks: Sequence[Sequence[Talk]],
    packed: Packed,
    seen: Sequence[Seen],
    shown: Shown,
) -> torch.Tensor:
    """Returns the mean of :func:`gaze_loss` over the layers that look; `plan` is the recipe's "gaze"."""
    rows, right = evidence(talks, packed, seen, shown)
    rows[:, 1] += read.mask.shape[-1] - read.mask.shape[-2]
    last = max(plan["layers"])
    losses = [
        gaze_loss(model, read, layer, plan["heads"], rows, right[:, int(layer == last)])
        for layer in plan["layers"]
    ]
    return torch.stack(losses).mean()


def looking_back_loss(
    model: Any, read: Read, plan: dict[str, int], seen: Sequence[Seen], shown: Shown
) -> torch.Tensor:
    """Returns :func:`gaze_loss` of visual tokens in which something begins: they look at the event before.

    What comes next is hard to find from a time: the search is for the smallest of all that are larger. A token that
    knows when the last event was can be found by that time, as all else is.

    Args:
        model: The video model.
        read: What it made of the batch.
        plan: The recipe's "looking_back": the layer, and how many of its heads.
        seen: The clips.
        shown: The tokens shown.
    """
    rows, tokens = [], []
    for line, (one, chosen) in enumerate(zip(seen, shown.chosen, strict=True)):
        frame, since = chosen // FRAME_TOKENS, one.since[chosen]
        begins = one.act[chosen] > 0
        # Before the first event there is the first frame.
        told = begins | ((frame == 0) & (one.owner[chosen] >= 0))
        before = (since[begins][:, None] == frame) & told
        known = before.any(1)
        rows += [(line, place + read.visual.start) for place in np.flatnonzero(begins)[known]]
        tokens.append(before[known])
    right = torch.from_numpy(np.concatenate(tokens))
    places = torch.tensor(rows, dtype=torch.long).reshape(-1, 2)
    pair = torch.stack([right, right], dim=1)
    return gaze_loss(model, read, plan["layer"], plan["heads"], places, pair)


def gaze_loss(
    model: Any, read: Read, layer: int, heads: int, rows: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Returns the mean of -log of the attention that the right tokens get together.

    Args:
        model: The video model.
        read: What it made of the batch.
        layer: Number of the layer that looks.
        heads: How many of its heads, from the first on.
        rows: Clip, and place in the whole sequence, of each of R rows that look ``(R, 2)``.
        tokens: The right tokens of each row, of the first head and of the others ``(R, 2, V)``.
    """
    language = model.model.language_model
    block = language.layers[layer]
    attention, hidden = block.self_attn, block.input_layernorm(read.layers[layer])
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
        places = rows[mine, 1]
        queries = rotary(attention.q_proj, hidden[line, places], (line, places))
        keys = rotary(attention.k_proj, hidden[line], (line, slice(None)))
        scores = torch.einsum("rhd,shd->hrs", queries, keys) * attention.scaling
        scores = scores + read.bias(line, places)
        wrong = ~tokens[mine].transpose(0, 1)[[min(head, 1) for head in range(heads)]]
        right = scores[..., read.visual].masked_fill(wrong, float("-inf"))
        losses.append(scores.logsumexp(-1) - right.logsumexp(-1))
    told = torch.cat(losses, dim=1)
    return told.sum() / max(told.numel(), 1)
