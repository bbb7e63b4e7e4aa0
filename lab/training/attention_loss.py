"""Attention loss: words of an answer attend to the visual tokens that show what they describe.

Answers are looked up among thousands of tokens. From answers alone, a head with uniform attention learns only
after a long time of chance hits; with supervised attention it learns in a fraction of the steps.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from espalier.harness.seedling.scenes import COLOUR_NAMES, SHAPES
from espalier.harness.seedling.video.clips import STRIDE
from espalier.harness.seedling.video.events import FIRST_TIME, MOST_FRAMES
from lab.training.clip_features import ClipTokens, ShownTokens
from lab.training.dialogue_packs import IGNORE, Packed
from lab.training.video_drills import Talk
from lab.training.video_model import FRAME_TOKENS
from lab.training.video_packs import Read

_BARE = frozenset(["at", "time", "the", "a", "with", "from", "to", "there", ";", "is"])
"""Words of captions without visual content."""


Things = tuple[tuple[int, int], ...]
"""(frame, track number) pairs."""


class Look(NamedTuple):
    """Attention targets for one word: of the first supervised head, and of the others.

    Attributes:
        early: In all supervised layers except the last.
        late: In the last supervised layer.
    """

    early: tuple[Things, Things]
    late: tuple[Things, Things]


def shown_by(talk: Talk) -> list[Look | None]:
    """Returns the attention targets of each word of an answer; None for words without visual content.

    Before a word about order, one head attends to each of the two events, so later layers can compare their
    times. The successor of an event is found in two steps: first the event, then its successor; the next
    counted object is found among all of them. Empty places have no target.
    """
    words = talk.answer.split()
    if talk.family == "caption":
        return [
            look
            for sentence in zip(_sentences(words), talk.shows, strict=True)
            for look in _sentence_looks(*sentence)
        ]
    if talk.family == "digits":
        return [_constant_look((item,)) for item in talk.shows for _ in ("time", "digit")]
    if talk.family == "order" and len(talk.shows) == 2:
        first, second = ((item,) for item in talk.shows)
        if words[-1] in ("before", "after"):
            return [
                _constant_look(first),
                _constant_look(second),
                Look((first, second), (first, second)),
            ]
        then = Look((first, first), (second, second))
        return [_constant_look(first), then, *[_constant_look(second)] * (len(words) - 2)]
    if talk.family == "how_many" and talk.shows:
        return [*_counted(words[:-1], talk.shows), _constant_look(talk.shows)]
    return [_constant_look(talk.shows) if talk.shows else None] * len(words)


def _counted(words: Sequence[str], shows: Things) -> list[Look | None]:
    """Returns targets as in `shown_by` for counting."""
    looks: list[Look | None] = []
    coming = iter(shows)
    for word in words:
        if word in COLOUR_NAMES:
            item = next(coming)
        named = word in (*COLOUR_NAMES, *SHAPES, "frame")
        looks.append(_among((item,), shows) if named else None)
    return looks


def _among(things: Things, all_things: Things) -> Look:
    return Look((all_things, things), (things, things))


def _constant_look(things: Things) -> Look:
    return Look((things, things), (things, things))


def _sentences(words: Sequence[str]) -> list[list[str]]:
    ends = [place + 1 for place, word in enumerate(words) if word == ";"]
    return [list(words[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _sentence_looks(words: Sequence[str], item: tuple[int, int]) -> list[Look | None]:
    """Returns targets as in `shown_by` for one sentence; the target of a move is visible at its end."""
    frame, track = item
    goal = words.index("to") if "moves" in words else len(words)
    return [
        None if word in _BARE else _constant_look(((frame + (STRIDE - 1) * (place > goal), track),))
        for place, word in enumerate(words)
    ]


def tokens_of(clip: ClipTokens, chosen: np.ndarray, frame: int, track: int) -> np.ndarray:
    """Returns the shown tokens ``(V,)`` with an object in a frame, or at its last place if it just disappeared."""
    in_frame: np.ndarray = chosen // FRAME_TOKENS == frame
    owned: np.ndarray = in_frame & (clip.owner[chosen] == track)
    begun: np.ndarray = in_frame & (clip.act[chosen] > 0)
    return owned if owned.any() else begun


class Looks(NamedTuple):
    """Supervised rows of a batch of B clips, at most R per clip, and their target tokens among the V shown.

    Equal targets are stored once: U sets of tokens. Padding rows have weight 0.

    Attributes:
        places: Positions of the rows ``(B, R)``, counted from the first word or the first visual token.
        sets: Sets of tokens ``(B, U, V)``, boolean; the first holds all.
        wanted: Target set of each row, early and late, for the first head and the others ``(B, R, 2, 2)``.
        worth: Weight of each row ``(B, R)``.
    """

    places: torch.Tensor
    sets: torch.Tensor
    wanted: torch.Tensor
    worth: torch.Tensor

    def to(self, device: torch.device | str) -> Looks:
        """Returns the same on a device."""
        return Looks(*(tensor.to(device) for tensor in self))

    def right(self, late: bool, first: bool) -> torch.Tensor:
        """Returns the target tokens of each row ``(B, R, V)``, by layer (last or not) and head (first or not)."""
        lines = torch.arange(len(self.sets), device=self.sets.device)[:, None]
        return self.sets[lines, self.wanted[:, :, int(late), int(not first)]]


class _SupervisedRow(NamedTuple):
    place: int
    wanted: Sequence[Hashable]
    worth: float


def _looks(
    lines: Sequence[Sequence[_SupervisedRow]],
    token_sets: Sequence[dict[Any, np.ndarray]],
    count: int,
) -> Looks:
    """Returns the rows of each clip, padded to the longest; `token_sets` are its sets of tokens by name."""
    longest = max(map(len, lines))
    sets = np.zeros((len(lines), 1 + max(map(len, token_sets)), count), bool)
    sets[:, 0] = True
    places = np.zeros((len(lines), longest), np.int64)
    wanted, worth = np.zeros((*places.shape, 2, 2), np.int64), np.zeros(places.shape, np.float32)
    for line, (rows, named) in enumerate(zip(lines, token_sets, strict=True)):
        number = {name: place for place, name in enumerate(named, start=1)}
        for place, tokens in enumerate(named.values(), start=1):
            sets[line, place] = tokens
        for place, row in enumerate(rows):
            places[line, place], worth[line, place] = row.place, row.worth
            wanted[line, place] = np.reshape([number[name] for name in row.wanted], (2, 2))
    return Looks(*map(torch.from_numpy, (places, sets, wanted, worth)))


def evidence(
    talks: Sequence[Sequence[Talk]],
    packed: Packed,
    clips: Sequence[ClipTokens],
    shown_tokens: ShownTokens,
) -> Looks:
    """Returns the words of answers with visible targets, and those tokens; a row has the weight of its word.

    Args:
        talks: Per clip.
        packed: The same, packed.
        clips: The clips.
        shown_tokens: The tokens shown.
    """
    lines: list[list[_SupervisedRow]] = []
    sets: list[dict[Things, np.ndarray]] = []
    for line, items in enumerate(talks):
        rows: list[_SupervisedRow] = []
        token_sets: dict[Things, np.ndarray] = {}
        segments, labels = packed.segments[line].numpy(), packed.labels[line].numpy()
        for number, talk in enumerate(items):
            places = np.flatnonzero((segments == number) & (labels != IGNORE))
            # The end is predicted after the answer, except in drills.
            for place, look in zip(places.tolist(), shown_by(talk), strict=False):
                if look is None:
                    continue
                wanted = [*look.early, *look.late]
                for things in wanted:
                    if things not in token_sets:
                        token_sets[things] = _union(clips[line], shown_tokens.chosen[line], things)
                if all(token_sets[things].any() for things in wanted):
                    rows.append(_SupervisedRow(place, wanted, float(packed.weights[line, place])))
        lines.append(rows)
        sets.append(token_sets)
    return _looks(lines, sets, shown_tokens.chosen.shape[1])


def of_times(
    looks: Looks, talks: Sequence[Sequence[Talk]], packed: Packed, families: Collection[str]
) -> Looks:
    """Returns the rows of `looks` with a time as target, in answers of some families."""
    labels = packed.labels.gather(1, looks.places)
    segments = packed.segments.gather(1, looks.places)
    of_families = torch.tensor(
        [
            [number >= 0 and talks[line][number].family in families for number in row]
            for line, row in enumerate(segments.tolist())
        ]
    )
    times = (labels >= FIRST_TIME) & (labels < FIRST_TIME + MOST_FRAMES)
    worth = looks.worth * (of_families.view_as(times) & times)
    kept = worth.any(0)
    return Looks(looks.places[:, kept], looks.sets, looks.wanted[:, kept], worth[:, kept])


def _union(clip: ClipTokens, chosen: np.ndarray, things: Things) -> np.ndarray:
    union: np.ndarray = np.any([tokens_of(clip, chosen, *thing) for thing in things], axis=0)
    return union


def looking_back(clips: Sequence[ClipTokens], shown_tokens: ShownTokens, since_what: str) -> Looks:
    """Returns the visual tokens in which an event begins, and the target tokens of the time that they name.

    The next event is hard to find from a time, as the smallest of all larger times. A token that
    stores the time of the previous event can be found by that time. The same holds for a token in which a digit
    appears, with the time of the previous digit.

    Args:
        clips: The clips.
        shown_tokens: The tokens shown.
        since_what: "since" or "since_digit".
    """
    lines: list[list[_SupervisedRow]] = []
    sets: list[dict[int, np.ndarray]] = []
    for clip, chosen in zip(clips, shown_tokens.chosen, strict=True):
        frame, since = chosen // FRAME_TOKENS, getattr(clip, since_what)[chosen]
        begins = since >= 0
        # The first event refers to the first frame.
        timed = begins | ((frame == 0) & (clip.owner[chosen] >= 0))
        token_sets = {before: timed & (frame == before) for before in set(since[begins].tolist())}
        token_sets = {before: tokens for before, tokens in token_sets.items() if tokens.any()}
        lines.append(
            [
                _SupervisedRow(place, [int(since[place])] * 4, 1.0)
                for place in np.flatnonzero(begins).tolist()
                if int(since[place]) in token_sets
            ]
        )
        sets.append(token_sets)
    return _looks(lines, sets, shown_tokens.chosen.shape[1])


def looking_loss(model: Any, read: Read, plan: dict[str, Any], looks: Looks) -> torch.Tensor:
    """Returns the mean of :func:`gaze_loss` of words over the supervised layers.

    `plan` is the recipe's "gaze".
    """
    heads, last = range(plan["heads"]), max(plan["layers"])
    losses = [
        gaze_loss(model, read, layer, heads, looks, of_words=True, late=layer == last)
        for layer in plan["layers"]
    ]
    return torch.stack(losses).mean()


def time_heads_loss(
    model: Any, read: Read, plan: dict[str, Any], looks: dict[str, Looks]
) -> torch.Tensor:
    """Returns the mean over layers of :func:`gaze_loss` of heads for times only, summed over their kinds.

    Args:
        model: The video model.
        read: The model's output for the batch.
        plan: The recipe's "time_heads": by kind of time, "families" of answers and "heads", one by layer.
        looks: Rows by kind, from :func:`of_times`.
    """
    losses = []
    for name, kind in plan.items():
        last = max(kind["heads"])
        layer_losses = [
            gaze_loss(
                *(model, read, layer, range(head, head + 1), looks[name]),
                of_words=True,
                late=layer == last,
            )
            for layer, head in kind["heads"].items()
        ]
        losses.append(torch.stack(layer_losses).mean())
    return torch.stack(losses).sum()


def looking_back_loss(
    model: Any, read: Read, plan: dict[str, int], looks: dict[str, Looks]
) -> torch.Tensor:
    """Returns :func:`gaze_loss` of visual tokens for the previous event, and with other heads for the previous digit.

    Args:
        model: The video model.
        read: The model's output for the batch.
        plan: The recipe's "looking_back": the layer, and its numbers of heads for events and for digits.
        looks: Rows by what is named, from :func:`looking_back`.
    """
    events, digits = plan["heads"], plan.get("digit_heads", 0)
    heads = {"since": range(events), "since_digit": range(events, events + digits)}
    losses = [
        gaze_loss(model, read, plan["layer"], heads[name], rows, of_words=False)
        for name, rows in looks.items()
        if heads[name]
    ]
    return torch.stack(losses).sum()


def gaze_loss(
    model: Any,
    read: Read,
    layer: int,
    heads: range,
    looks: Looks,
    of_words: bool,
    late: bool = False,
) -> torch.Tensor:
    """Returns the weighted mean of -log of the total attention to the target tokens.

    Args:
        model: The video model.
        read: The model's output for the batch.
        layer: Number of the supervised layer.
        heads: Its supervised heads, consecutive.
        looks: The supervised rows.
        of_words: Whether the rows are words; else visual tokens.
        late: Whether the layer is the last supervised one.
    """
    language = model.model.language_model
    block = language.layers[layer]
    attention, hidden = block.self_attn, block.input_layernorm(read.layers[layer].float())
    width = slice(heads.start * attention.head_dim, heads.stop * attention.head_dim)
    cos, sin = language.rotary_emb(hidden, read.positions)
    places = looks.places + (read.prefix if of_words else read.visual.start)
    lines = torch.arange(len(hidden), device=hidden.device)[:, None]

    def rotary(projection: Any, states: torch.Tensor, positions: Any) -> torch.Tensor:
        projected = torch.nn.functional.linear(
            states, projection.weight[width], projection.bias[width]
        )
        projected = projected.unflatten(-1, (len(heads), attention.head_dim))
        low, high = projected.chunk(2, dim=-1)
        rotated = torch.cat([-high, low], dim=-1)
        turned: torch.Tensor = (
            projected * cos[positions][..., None, :] + rotated * sin[positions][..., None, :]
        )
        return turned

    queries = rotary(attention.q_proj, hidden[lines, places], (lines, places))
    keys = rotary(attention.k_proj, hidden, ...)
    scores = torch.einsum("brhd,bshd->hbrs", queries, keys) * attention.scaling
    scores = scores + read.bias(places, of_words)
    right = [looks.right(late, first=head == 0) for head in range(len(heads))]
    target_scores = scores[..., read.visual].masked_fill(~torch.stack(right), float("-inf"))
    lost = (scores.logsumexp(-1) - target_scores.logsumexp(-1)) * looks.worth
    mean: torch.Tensor = lost.sum() / (len(heads) * looks.worth.sum()).clamp(min=1e-6)
    return mean
