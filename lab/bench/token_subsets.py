"""Subsets of one scene's visual tokens that are chosen on purpose, and what each consists of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.select.topk import top


@dataclass(frozen=True)
class SceneTokens:
    """What the target saw of one scene.

    Attributes:
        features: (N, D) visual tokens as they entered the decoder, N a square.
        closer: (N,) how far the target's first layer moved each towards the words, UV-Prune's score.
        objects: (N,) which of them show an object.
    """

    features: Tensor
    closer: Tensor
    objects: Tensor


def subsets(
    scene: SceneTokens, next_scene: SceneTokens, keep: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return (keep,) ascending visual tokens by selection criterion.

    Args:
        scene: the scene.
        next_scene: another scene, as a control: its choice has the same shape and other content.
        keep: tokens of each subset.
        generator: the only source of randomness.
    """
    count = len(scene.closer)
    chance = torch.rand(count, generator=generator)
    objects = scene.objects.float()
    unit = normalize(scene.features.float(), dim=-1)
    centre = int(torch.randint(count, (), generator=generator))
    side = round(count**0.5)
    raster = torch.stack([torch.arange(count) // side, torch.arange(count) % side], dim=1)
    away = (raster - raster[centre]).abs().sum(1)
    rank = scene.closer.argsort().argsort() / count  # in [0, 1): breaks ties of whole numbers
    mixed = chance.clone()
    mixed[_top(scene.closer, keep // 2)] = 2.0
    return {
        "random": _top(chance, keep),
        "uniform": torch.arange(keep) * count // keep,
        "uvprune": _top(scene.closer, keep),
        "uvprune, sign turned": _top(-scene.closer, keep),
        "uvprune of another scene": _top(next_scene.closer, keep),
        "half uvprune, half random": _top(mixed, keep),
        "objects, then random": _top(objects + chance / 2, keep),
        "objects, then uvprune": _top(objects + rank / 2, keep),
        "objects, then sign turned": _top(objects - rank / 2, keep),
        "no object, random": _top(chance / 2 - objects, keep),
        "next to one place": _top(-away - chance / 2, keep),
        "alike one token": _top(unit @ unit[centre], keep),
    }


def make_up(kept: Tensor, scene: SceneTokens) -> dict[str, float]:
    """Return of what a subset (K,) consists: objects kept, neighbours kept, mean cosine of two kept tokens."""
    count = len(scene.closer)
    side = round(count**0.5)
    mask = torch.zeros(count, dtype=torch.bool)
    mask[kept] = True
    square = mask.view(side, side)
    pairs = [(square[1:], square[:-1]), (square[:, 1:], square[:, :-1])]
    touching = sum(int((first & two).sum()) for first, two in pairs)
    # Of each kept token the neighbours that the raster has.
    present = sum(int(first.sum() + two.sum()) for first, two in pairs)
    unit = normalize(scene.features[kept].float(), dim=-1)
    alike = (unit.sum(0).square().sum() - len(kept)) / (len(kept) * (len(kept) - 1))
    return {
        "objects": float(mask[scene.objects].float().mean()),
        "neighbours": 2 * touching / present,
        "alike": float(alike),
    }


def _top(scores: Tensor, keep: int) -> Tensor:
    return top(scores[None], keep)[0]
