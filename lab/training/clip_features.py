"""Clips for training the video model: pooled features, token labels, and subsets of shown tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from espalier.harness.seedling.scenes import COLOUR_NAMES, GRID, SHAPES
from espalier.harness.seedling.video.clips import STRIDE, DrawnClip, clip
from lab.training.dialogue_packs import PREFIX
from lab.training.seedling_model import normalise
from lab.training.seedling_tower import patch_features
from lab.training.video_model import FRAME_TOKENS

_Patches = TypeVar("_Patches", np.ndarray, torch.Tensor)

ACTS = ("no", "enters", "leaves", "moves", "turns", "covered", "seen", "changes")
"""Words for what begins in a token's frame; the first: nothing."""
_KINDS = ("", "enter", "leave", "move", "turn", "cover", "uncover", "change")


@dataclass(frozen=True, eq=False)
class ClipTokens:
    """A clip and its tower features; N is 36 tokens for each of T frames.

    Attributes:
        clip: The clip.
        features: Tower features of the four patches of each token ``(N, 4, 128)``, bfloat16; None if the tower
            has not run on it.
        owner: Object number of each token, -1 for none ``(N,)``.
        kind: The digit, or 10 plus the shape number, in each token; -1 for none ``(N,)``.
        colour: Colour number, -1 for none ``(N,)``.
        act: Index into :data:`ACTS` of the event that begins there ``(N,)``.
        was_kind: `kind` of the object before the event; -1 where nothing begins ``(N,)``.
        was_colour: `colour` of the object before the event ``(N,)``.
        since: Frame of the event before the one that begins there, 0 for the first; -1 where nothing
            begins ``(N,)``.
        since_digit: Frame of the digit before the one that appears there, 0 for the first; -1 where
            none does ``(N,)``.
    """

    clip: DrawnClip
    features: torch.Tensor | None
    owner: np.ndarray
    kind: np.ndarray
    colour: np.ndarray
    act: np.ndarray
    was_kind: np.ndarray
    was_colour: np.ndarray
    since: np.ndarray
    since_digit: np.ndarray


def blocks(patches: _Patches) -> _Patches:
    """Regroups patches ``(T, 144, ...)`` into tokens of 2 x 2 ``(T, 36, 4, ...)``, in raster order."""
    frames, shape, half = len(patches), patches.shape[2:], GRID // 2
    grid = patches.reshape(frames, half, 2, half, 2, *shape).swapaxes(2, 3)
    return grid.reshape(frames, half * half, 4, *shape)


def see(tower: Any, split: str, seed: int, index: int, frames: int) -> ClipTokens:
    """Draws a clip, runs the frozen tower over its frames and labels its tokens."""
    drawn = clip(split, seed, index, frames)
    features = features_of(tower, torch.from_numpy(drawn.frames))
    return replace(labelled(drawn), features=features.cpu())


@torch.no_grad()
def features_of(tower: Any, frames: torch.Tensor) -> torch.Tensor:
    """Returns the tower's features of frames ``(T, 96, 96, 3)`` uint8, as tokens ``(N, 4, 128)``, bfloat16.

    Batches are small on a CPU, because of its cache, and large on an accelerator.
    """
    device = next(tower.parameters()).device
    parts = frames.split(16 if device.type == "cpu" else 1024)
    features = [
        blocks(patch_features(tower, normalise(part.to(device)))[:, 1:]).bfloat16()
        for part in parts
    ]
    return torch.cat(features).flatten(0, 1)


def labelled(drawn: DrawnClip) -> ClipTokens:
    """Labels the tokens of a clip without running the tower."""
    owner = owners_of(drawn)
    kind, colour = np.full(owner.shape, -1), np.full(owner.shape, -1)
    for number, track in enumerate(drawn.tracks):
        for frame in np.flatnonzero((track.colour >= 0) & ~track.covered).tolist():
            mine = owner[frame] == number
            digit = int(track.digit[frame])
            kind[frame, mine] = digit if digit >= 0 else 10 + SHAPES.index(track.thing)
            colour[frame, mine] = track.colour[frame]
    act = acts_of(drawn, owner)
    was_kind, was_colour = subjects_of(drawn, act)
    arrays = (
        *(owner, kind, colour, act, was_kind, was_colour),
        *(events_before(drawn, act), digits_before(drawn, act)),
    )
    return ClipTokens(drawn, None, *(array.ravel() for array in arrays))


def owners_of(drawn: DrawnClip) -> np.ndarray:
    """Returns the object with most patches of each token ``(T, 36)``, -1 for none."""
    patches = blocks(drawn.patches)
    owner, largest = np.full(patches.shape[:2], -1), np.zeros(patches.shape[:2], np.int64)
    for number in range(len(drawn.tracks)):
        count = (patches == number).sum(-1)
        owner[count > largest] = number
        largest = np.maximum(largest, count)
    return owner


def acts_of(drawn: DrawnClip, owner: np.ndarray) -> np.ndarray:
    """Returns the index into :data:`ACTS` of what begins in each token ``(T, 36)``, by the tokens' owners."""
    act = np.zeros(owner.shape, np.int64)
    for event in drawn.events:
        if event.kind in _KINDS:
            # Objects that disappeared are labelled at their last place.
            frame = event.frame - (event.kind == "leave")
            act[event.frame, owner[frame] == event.track] = _KINDS.index(event.kind)
    return act


def subjects_of(drawn: DrawnClip, act: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns digit or shape, and colour, of the object before an event, in its tokens ``(T, 36)``."""
    kind, colour = np.full(act.shape, -1), np.full(act.shape, -1)
    for event in drawn.events:
        if event.kind in _KINDS:
            mine = act[event.frame] > 0
            kind[event.frame, mine] = int(event.digit or 10 + SHAPES.index(event.thing))
            colour[event.frame, mine] = COLOUR_NAMES.index(event.colour)
    return kind, colour


def events_before(drawn: DrawnClip, act: np.ndarray) -> np.ndarray:
    """Returns the frame of the event before the one that begins in each token ``(T, 36)``, else -1."""
    frames = sorted({event.frame for event in drawn.events})
    before = np.zeros(len(act), np.int64)
    before[frames[1:]] = frames[:-1]
    since: np.ndarray = np.where(act > 0, before[:, None], -1)
    return since


def digits_before(drawn: DrawnClip, act: np.ndarray) -> np.ndarray:
    """Returns the frame of the digit before the one that appears in each token ``(T, 36)``, else -1."""
    since = np.full(act.shape, -1)
    last = 0
    for event in drawn.events:
        if event.kind == "change" or (event.kind == "enter" and event.digit):
            since[event.frame, act[event.frame] > 0] = last
            last = event.frame
    return since


@dataclass(frozen=True, eq=False)
class ShownTokens:
    """The visual tokens shown of a batch of B clips, V per clip.

    Attributes:
        chosen: Their numbers ``(B, V)``, ascending.
        features: Tower features of their patches ``(B, V, 4, 128)``; empty if the tower has not run.
        first: Frame number assigned to the clips' first frame.
        frames: T of the clips.
    """

    chosen: np.ndarray
    features: torch.Tensor | None
    first: int
    frames: int

    @property
    def positions(self) -> torch.Tensor:
        """Position ids ``(B, V)``."""
        return torch.from_numpy(self.chosen) + len(PREFIX) + FRAME_TOKENS * self.first

    @property
    def end(self) -> int:
        """Position of the newline after the video."""
        return len(PREFIX) + FRAME_TOKENS * (self.first + self.frames)

    def labels(self, values: Sequence[np.ndarray]) -> torch.Tensor:
        """Returns the chosen tokens' entries of one array per clip ``(B, V)``."""
        return torch.from_numpy(np.take_along_axis(np.stack(values), self.chosen, 1))


def needed(clip: ClipTokens, shows: Iterable[tuple[int, int]]) -> np.ndarray:
    """Returns the tokens ``(N,)`` that show described objects, from the frame before to the end of a move.

    Args:
        clip: The clip.
        shows: (frame, track number) of each described object.
    """
    owner, act = (values.reshape(-1, FRAME_TOKENS) for values in (clip.owner, clip.act))
    tokens = np.zeros(owner.shape, bool)
    for frame, track in shows:
        around = slice(max(frame - 1, 0), frame + STRIDE)
        tokens[around] |= owner[around] == track
        # Objects that disappeared are labelled at their last place.
        tokens[frame] |= act[frame] > 0
    return tokens.ravel()


def show(
    clips: Sequence[ClipTokens],
    keep: int,
    tilt: float,
    rng: np.random.Generator,
    first: int = 0,
    needs: Sequence[np.ndarray] = (),
) -> ShownTokens:
    """Chooses visual tokens, at their original positions.

    Args:
        clips: Clips of equal length.
        keep: Tokens to keep per clip.
        tilt: Maximum preference for objects; each clip draws one up to it. 0 is uniformly random
            and 1 goes up to objects first.
        rng: Source of choices.
        first: See :class:`Shown`.
        needs: Tokens ``(N,)`` of each clip that are kept before all others.
    """
    inside = np.stack([clip.owner >= 0 for clip in clips])
    score = rng.random(inside.shape)
    score += tilt * rng.random((len(clips), 1)) * inside
    if needs:
        score += (1 + tilt) * np.stack(needs)
        keep = max(keep, *(int(tokens.sum()) for tokens in needs))
    chosen = np.sort(np.argsort(-score, axis=1)[:, :keep], axis=1)
    features_of_clips = [clip.features for clip in clips if clip.features is not None]
    features = taken(torch.stack(features_of_clips), chosen) if features_of_clips else None
    return ShownTokens(chosen, features, first, len(clips[0].clip.frames))


def taken(features: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
    """Selects the features ``(B, V, 4, 128)`` of tokens ``(B, V)`` from those of all tokens ``(B, N, 4, 128)``."""
    places = torch.from_numpy(chosen).to(features.device)
    return features[torch.arange(len(places), device=places.device)[:, None], places].float()


def visual_tokens(model: Any, shown_tokens: ShownTokens) -> torch.Tensor:
    """Projects the patches of the tokens shown and pools four to a token ``(B, V, D)``.

    The mean of 2 x 2 equals the model's bilinear pooling of an even grid.

    Raises:
        ValueError: The tower has not run on the clips.
    """
    if shown_tokens.features is None:
        raise ValueError("these tokens have no features; see() runs the tower, labelled() does not")
    features = shown_tokens.features.to(model.device)
    tokens: torch.Tensor = model.model.multi_modal_projector(features).mean(-2)
    return tokens
