"""Clips as the video model sees them in training: pooled features, labels of tokens, packed dialogues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from harness.seedling.model import normalise
from harness.seedling.scenes import COLOUR_NAMES
from harness.seedling.sprites import SHAPES
from harness.seedling.targets import GRID
from harness.seedling.tower import patch_features
from harness.seedling.training.packing import IGNORE, PREFIX, Packed
from harness.seedling.training.video_drills import Talk
from harness.seedling.video.clips import Clip, clip
from harness.seedling.video.vocabulary import FIRST_TIME, MOST_FRAMES, TOKEN_ID, encode
from harness.seedling.video_model import FRAME_TOKENS
from harness.seedling.vocabulary import ASSISTANT, EOS, PAD

ATTENTION = "seedling_video_packed"
ACTS = ("no", "enters", "leaves", "moves", "turns", "covered", "seen", "changes")
"""Words that tell what begins in a token's frame; the first: nothing."""
_LOOKS = [TOKEN_ID[word] for word in (*map(str, range(10)), *SHAPES)]
_COLOURS = [TOKEN_ID[word] for word in COLOUR_NAMES]
_ACTS = [TOKEN_ID[word] for word in ACTS]
_KINDS = ("", "enter", "leave", "move", "turn", "cover", "uncover", "change")


@dataclass(frozen=True, eq=False)
class Seen:
    """A clip and what the tower makes of it; N is 36 tokens for each of T frames.

    Attributes:
        clip: The clip.
        features: Tower features of the four patches of each token ``(N, 4, 128)``, bfloat16.
        owner: Number of the object in each token, -1 for none ``(N,)``.
        kind: The digit, or 10 and the number of the shape, in each token; -1 where none is seen ``(N,)``.
        colour: Number of its colour, -1 where none is seen ``(N,)``.
        act: Which of :data:`ACTS` begins there ``(N,)``.
    """

    clip: Clip
    features: torch.Tensor
    owner: np.ndarray
    kind: np.ndarray
    colour: np.ndarray
    act: np.ndarray


def blocks(patches: np.ndarray) -> np.ndarray:
    """Regroups patches ``(T, 144, ...)`` into tokens of 2 x 2 ``(T, 36, 4, ...)``, in raster order."""
    frames, rest, half = len(patches), patches.shape[2:], GRID // 2
    grid = patches.reshape(frames, half, 2, half, 2, *rest)
    return np.moveaxis(grid, 2, 3).reshape(frames, half * half, 4, *rest)


@torch.no_grad()
def see(tower: Any, split: str, seed: int, index: int, frames: int) -> Seen:
    """Draws a clip, runs the frozen tower over its frames and labels its tokens."""
    drawn = clip(split, seed, index, frames)
    features = torch.cat(
        [
            patch_features(tower, normalise(part))[:, 1:]
            for part in np.split(drawn.frames, range(16, frames, 16))
        ]
    )
    grouped = torch.from_numpy(blocks(features.numpy())).flatten(0, 1).bfloat16()
    owner = _owners(drawn)
    kind, colour = np.full(owner.shape, -1), np.full(owner.shape, -1)
    for number, track in enumerate(drawn.tracks):
        for frame in np.flatnonzero((track.colour >= 0) & ~track.covered).tolist():
            mine = owner[frame] == number
            digit = int(track.digit[frame])
            kind[frame, mine] = digit if digit >= 0 else 10 + SHAPES.index(track.thing)
            colour[frame, mine] = track.colour[frame]
    act = _acts(drawn, owner)
    return Seen(drawn, grouped, owner.ravel(), kind.ravel(), colour.ravel(), act.ravel())


def _owners(drawn: Clip) -> np.ndarray:
    """Returns the object that has most patches of each token ``(T, 36)``, -1 for none."""
    patches = blocks(drawn.patches)
    owner, most = np.full(patches.shape[:2], -1), np.zeros(patches.shape[:2], np.int64)
    for number in range(len(drawn.tracks)):
        count = (patches == number).sum(-1)
        owner[count > most] = number
        most = np.maximum(most, count)
    return owner


def _acts(drawn: Clip, owner: np.ndarray) -> np.ndarray:
    act = np.zeros(owner.shape, np.int64)
    for event in drawn.events:
        if event.kind in _KINDS:
            # What has left is seen by where it was.
            frame = event.frame - (event.kind == "leave")
            act[event.frame, owner[frame] == event.track] = _KINDS.index(event.kind)
    return act


@dataclass(frozen=True, eq=False)
class Shown:
    """The visual tokens that a batch of B clips shows, V of each.

    Attributes:
        chosen: Their numbers ``(B, V)``, ascending.
        features: Tower features of their patches ``(B, V, 4, 128)``.
        first: Frame whose time and place the clips' first frame takes.
        frames: T of the clips.
    """

    chosen: np.ndarray
    features: torch.Tensor
    first: int
    frames: int

    @property
    def positions(self) -> torch.Tensor:
        """Position ids ``(B, V)``."""
        return torch.from_numpy(self.chosen) + len(PREFIX) + FRAME_TOKENS * self.first

    @property
    def end(self) -> int:
        """Position of the newline behind the video."""
        return len(PREFIX) + FRAME_TOKENS * (self.first + self.frames)

    def labels(self, values: Sequence[np.ndarray]) -> torch.Tensor:
        """Returns the chosen tokens' entries of one array a clip ``(B, V)``."""
        return torch.from_numpy(np.take_along_axis(np.stack(values), self.chosen, 1))


def show(
    seen: Sequence[Seen], keep: int, tilt: float, rng: np.random.Generator, first: int = 0
) -> Shown:
    """Chooses visual tokens, at their original places.

    Args:
        seen: Clips of equal length.
        keep: Tokens to keep of each.
        tilt: Largest preference for objects; each clip draws its own below it. 0 is plainly random
            and 1 goes up to objects first.
        rng: Source of choices.
        first: See :class:`Shown`.
    """
    inside = np.stack([one.owner >= 0 for one in seen])
    score = rng.random(inside.shape)
    score += tilt * rng.random((len(seen), 1)) * inside
    chosen = np.sort(np.argsort(-score, axis=1)[:, :keep], axis=1)
    features = torch.stack(
        [one.features[torch.from_numpy(row)] for one, row in zip(seen, chosen, strict=True)]
    )
    return Shown(chosen, features.float(), first, len(seen[0].clip.frames))


def visual_tokens(model: Any, features: torch.Tensor) -> torch.Tensor:
    """Projects patches and pools four to a token: ``(B, V, 4, 128)`` to ``(B, V, D)``.

    The mean of 2 x 2 is what the model's bilinear pooling of an even grid comes to.
    """
    tokens: torch.Tensor = model.model.multi_modal_projector(features).mean(-2)
    return tokens


def pack_talks(talks: Sequence[Sequence[Talk]], weights: dict[str, float], shown: Shown) -> Packed:
    """Packs the dialogues of B clips; each sees its clip and itself.

    Args:
        talks: Per clip.
        weights: Loss weight per family, and of "end".
        shown: Where the text begins, and by how much times are shifted.
    """
    rows = [[_row(talk, weights, shown.first) for talk in items] for items in talks]
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
            positions[line, span] = shown.end + 1 + np.arange(len(words))
            segments[line, span] = number
            start = span.stop
    arrays = (tokens, labels, loss_weights, positions, segments)
    return Packed(*(torch.from_numpy(array) for array in arrays))


def _row(
    talk: Talk, weights: dict[str, float], first: int
) -> tuple[list[int], list[int], list[float]]:
    """Returns tokens, labels and weights of one dialogue, its times shifted by `first` frames."""
    asked, answer = (_later(encode(text), first) for text in (talk.question, talk.answer))
    weight = weights[talk.family]
    if talk.family == "drill":
        words = [*asked, *answer]
        silent = len(asked) - 1
        return words[:-1], [IGNORE] * silent + answer, [0.0] * silent + [weight] * len(answer)
    silent = len(asked)
    return (
        [*asked, ASSISTANT, *answer],
        [IGNORE] * silent + [*answer, EOS],
        [0.0] * silent + [weight] * len(answer) + [weight * weights["end"]],
    )


def _later(tokens: list[int], frames: int) -> list[int]:
    times = range(FIRST_TIME, FIRST_TIME + MOST_FRAMES)
    return [token + frames if token in times else token for token in tokens]


def video_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attends causally inside the prefix, then lets the text rows see prefix and own dialogue.

    The fused kernel is two to three times as fast here as separate products with a mask.
    """
    prefix = attention_mask.shape[-1] - attention_mask.shape[-2]
    attend = F.scaled_dot_product_attention
    parts = (query[:, :, :prefix], key[:, :, :prefix], value[:, :, :prefix])
    video = attend(*parts, is_causal=True, scale=scaling)
    text = attend(query[:, :, prefix:], key, value, attn_mask=attention_mask, scale=scaling)
    return torch.cat([video, text], dim=2).transpose(1, 2).contiguous(), None


def video_hidden(
    model: Any, visual: torch.Tensor, shown: Shown, packed: Packed
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Runs the language model over a packed batch.

    Returns:
        Hidden states of the text rows ``(B, L, D)``, and of the visual tokens behind each layer
        ``(B, V, D)``, first the tokens themselves.
    """
    language = model.model.language_model
    batch, count = visual.shape[:2]
    start = language.embed_tokens(torch.tensor(PREFIX)).expand(batch, -1, -1)
    newline = model.model.image_newline.expand(batch, 1, -1)
    text = language.embed_tokens(packed.tokens)
    places = [
        torch.arange(len(PREFIX)).expand(batch, -1),
        shown.positions,
        torch.full((batch, 1), shown.end),
        packed.positions,
    ]
    prefix = len(PREFIX) + count + 1
    output = language(
        inputs_embeds=torch.cat([start, visual, newline, text], dim=1),
        attention_mask=packed.mask(prefix),
        position_ids=torch.cat(places, dim=1),
        use_cache=False,
        output_hidden_states=True,
    )
    span = slice(len(PREFIX), len(PREFIX) + count)
    return output.last_hidden_state[:, prefix:], tuple(h[:, span] for h in output.hidden_states)


class Namers(nn.Module):
    """Asks visual tokens to name what they are, when they are shown and what begins there.

    They name with the word embeddings, each of the three by a learned scale. This stands in for the
    language alignment a tower would bring along, and for the time that positions alone do not say.
    """

    def __init__(self) -> None:
        """Starts with scale 1 for each."""
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def losses(
        self,
        model: Any,
        hidden: Sequence[torch.Tensor],
        layers: tuple[int, int],
        seen: Sequence[Seen],
        shown: Shown,
    ) -> dict[str, torch.Tensor]:
        """Returns the loss terms "look", "time" and "act".

        Args:
            model: The video model.
            hidden: Of the visual tokens, as :func:`video_hidden` returns them.
            layers: Behind how many layers the time and the acts are named.
            seen: The clips.
            shown: The tokens shown.
        """
        words = model.model.language_model.embed_tokens.weight
        kind, colour, act, owner = (
            shown.labels([getattr(one, name) for one in seen])
            for name in ("kind", "colour", "act", "owner")
        )
        inside, owned = kind >= 0, (owner >= 0) | (act > 0)
        look = self._unit(hidden[0][inside], 0)
        when = self._unit(hidden[layers[0]], 1).flatten(0, 1)
        frame = torch.from_numpy(shown.chosen // FRAME_TOKENS + shown.first).flatten()
        begun = self._unit(hidden[layers[1]][owned], 2) @ words[_ACTS].T
        error = F.cross_entropy(begun, act[owned], reduction="none")
        worth = torch.where(act[owned] > 0, 4.0, 1.0)
        return {
            "look": F.cross_entropy(look @ words[_LOOKS].T, kind[inside])
            + F.cross_entropy(look @ words[_COLOURS].T, colour[inside]),
            "time": F.cross_entropy(when @ words[FIRST_TIME : FIRST_TIME + MOST_FRAMES].T, frame),
            "act": (error * worth).sum() / worth.sum(),
        }

    def _unit(self, rows: torch.Tensor, which: int) -> torch.Tensor:
        return self.gain[which] * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
