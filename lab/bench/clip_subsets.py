"""Subsets of a clip's visual tokens: chosen by the target, at random, by place or by content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.select.topk import top


@dataclass(frozen=True)
class SeenClip:
    """Data of one clip of N = T x S visual tokens, S per frame.

    Attributes:
        frames: T.
        features: (N, D) visual tokens as they entered the target's decoder.
        scores: (N,) what the target would keep, highest first, by the name of the rule.
        objects: (N,) which tokens show an object.
        begins: (N,) in which an event begins.
    """

    frames: int
    features: Tensor
    scores: Mapping[str, Tensor]
    objects: Tensor
    begins: Tensor

    def shares(self, kept: Tensor) -> tuple[float, float]:
        """Return the shares of the tokens of objects, and of events, that are among those kept (K,)."""
        objects, events = (float(of[kept].sum() / of.sum()) for of in (self.objects, self.begins))
        return objects, events


def clip_subsets(clip: SeenClip, keep: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return (keep,) ascending visual tokens by selection criterion.

    Args:
        clip: the clip.
        keep: tokens of each subset.
        generator: the only source of randomness.
    """
    count = len(clip.features)
    size = count // clip.frames
    chance = torch.rand(count, generator=generator)
    frame, cell = torch.arange(count) // size, torch.arange(count) % size
    # In [0, 1), evenly spread whatever prefix of it is taken.
    in_time, in_space = _spread(clip.frames)[frame], _spread(size)[cell]
    scores = {
        "random": chance,
        "even in time and space": -((torch.arange(count) * keep) % count).float(),
        "whole frames, even in time": -in_time - in_space / (4 * clip.frames),
        "the same places of all frames": -in_space - in_time / (4 * size),
        "what changed since the frame before": _change(clip),
        "objects, then random": clip.objects + chance / 2,
        "events, then objects": 2 * clip.begins + clip.objects + chance / 2,
        "no object, random": chance / 2 - clip.objects.float(),
    }
    scores |= dict(clip.scores)
    return {name: top(score[None].float(), keep)[0] for name, score in scores.items()}


def _change(clip: SeenClip) -> Tensor:
    """Return (N,) one minus the cosine with the token of the same place a frame before; the first frame comes first."""
    frames = normalize(clip.features.float(), dim=-1).unflatten(0, (clip.frames, -1))
    change = 1 - (frames[1:] * frames[:-1]).sum(-1)
    return torch.cat([torch.full_like(change[:1], 2.0), change]).flatten()


def _spread(count: int) -> Tensor:
    """Return (count,) ranks in [0, 1) of places in an order that halves the largest gap again and again."""
    bits = max(1, (count - 1).bit_length())
    places = torch.arange(count)
    reversed_bits = sum(((places >> bit) & 1) << (bits - 1 - bit) for bit in range(bits))
    assert isinstance(reversed_bits, Tensor)
    return reversed_bits.argsort().argsort() / count
