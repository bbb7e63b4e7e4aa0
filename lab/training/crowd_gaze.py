"""Attention loss of crowded scenes: answer words look at the patches that show what they say.

As for clips, a lookup among hundreds of tokens is learned in a fraction of the steps that answers alone need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from espalier.harness.seedling.crowd import GRID
from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.seedling.scenes import PATCH, SceneObject
from lab.training.dialogue_packs import IGNORE, PREFIX, Packed
from lab.training.video_packs import video_attention

GAZE_ATTENTION = "seedling_crowd_packed"
REST = 4.0
"""Attention on the first words of a head that counts, in that on one object."""


@dataclass
class Watched:
    """What a forward pass leaves for the losses.

    Attributes:
        attention: Queries of words and keys of the prefix, by layer; None before the pass.
        states: Hidden states before each layer ``(B, S, D)``.
    """

    attention: dict[int, Any]
    states: Sequence[torch.Tensor] = ()


def gaze_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    watched: Watched | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attends as :func:`video_attention` does, and keeps queries and keys of the watched layers."""
    layer: Any = module.layer_idx
    if watched is not None and layer in watched.attention:
        prefix = attention_mask.shape[-1] - attention_mask.shape[-2]
        watched.attention[layer] = (query[:, :, prefix:] * scaling, key[:, :, :prefix])
    return video_attention(module, query, key, value, attention_mask, scaling, **settings)


def objects_looked_at(
    question: SceneQuestion, objects: Sequence[SceneObject]
) -> list[tuple[list[int], list[int]]]:
    """Returns the numbers of the objects of each word of an answer: all candidates, and those that decide."""
    words = question.text.split()
    slots = range(len(objects))
    if question.family == "number":
        row = [
            slot
            for slot in slots
            if objects[slot].kind == "digit" and objects[slot].colour == words[2]
        ]
        return [(row, [slot]) for slot in row]
    shapes = [slot for slot in slots if objects[slot].kind == "shape"]
    if question.family == "count":
        counted = [
            slot for slot in shapes if words[2] in (objects[slot].name, objects[slot].colour)
        ]
        return [(counted, counted)]
    if question.target is not None:
        target = [objects.index(question.target)]
        alike = [slot for slot in shapes if objects[slot].name == question.target.name]
        return [(alike if question.family == "relation" else target, target)]
    alike = [slot for slot in shapes if objects[slot].name == words[4]]
    return [(alike, alike)]


def counting_targets(
    packed: Packed,
    questions: Sequence[Sequence[SceneQuestion]],
    scenes: Sequence[Sequence[SceneObject]],
) -> torch.Tensor:
    """Returns the patch in the middle of each counted object, for the word that counts ``(B, L, N)``."""
    batch, length = packed.tokens.shape
    result = torch.zeros(batch, length, GRID * GRID, dtype=torch.bool)
    for line, (dialogues, objects) in enumerate(zip(questions, scenes, strict=True)):
        for number, question in enumerate(dialogues):
            if question.family != "count":
                continue
            answered = (packed.segments[line] == number) & (packed.labels[line] != IGNORE)
            for slot in objects_looked_at(question, objects)[0][0]:
                x0, y0, x1, y1 = objects[slot].box
                patch = (y0 + y1) // 2 // PATCH * GRID + (x0 + x1) // 2 // PATCH
                result[line, answered.nonzero()[0, 0], patch] = True
    return result


def gaze_targets(
    packed: Packed,
    questions: Sequence[Sequence[SceneQuestion]],
    scenes: Sequence[Sequence[SceneObject]],
    owner: np.ndarray,
) -> torch.Tensor:
    """Returns the patches to look at ``(2, B, L, N)``, candidates and deciding ones; none where nothing is answered.

    Args:
        packed: The packed questions.
        questions: The same, per scene.
        scenes: The objects of each scene.
        owner: Number of the object of each patch ``(B, N)``, -1 for none.
    """
    batch, length = packed.tokens.shape
    result = np.zeros((2, batch, length, owner.shape[1]), bool)
    for line, (dialogues, objects) in enumerate(zip(questions, scenes, strict=True)):
        segments, labels = packed.segments[line].numpy(), packed.labels[line].numpy()
        for number, question in enumerate(dialogues):
            places = np.flatnonzero((segments == number) & (labels != IGNORE))
            # The last place predicts the end.
            for place, sets in zip(places[:-1], objects_looked_at(question, objects), strict=True):
                for kind, slots in enumerate(sets):
                    result[kind, line, place] = np.isin(owner[line], slots)
    return torch.from_numpy(result)


def gaze_loss(
    watched: Watched, layers: Sequence[int], heads: int, targets: torch.Tensor
) -> torch.Tensor:
    """Returns the negative logarithm of the attention on the right patches, a mean over words, heads and two layers.

    Args:
        watched: With queries and keys of the two layers.
        layers: The layer that looks at the candidates, and the one that looks at what decides.
        heads: Number of the first heads that learn it.
        targets: Patches among the V visual tokens shown ``(2, B, L, V)``.
    """
    losses = []
    for layer, right in zip(layers, targets, strict=True):
        query, key = (rows[:, :heads] for rows in watched.attention[layer])
        shares = (query @ key[:, :, len(PREFIX) :].transpose(-1, -2)).log_softmax(-1)
        rows = right.any(-1)
        shares = shares.transpose(1, 2)[rows]
        kept = shares.masked_fill(~right[rows][:, None], float("-inf"))
        losses.append(-kept.logsumexp(-1).mean())
    return torch.stack(losses).mean()


def counting_loss(queries_and_keys: Any, heads: int, targets: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy of attention that counts: one part on each object, :data:`REST` on the first words.

    Attention sums to one, so a head that looks at the objects alone gives their mean, the same for two as for nine.

    Args:
        queries_and_keys: Queries and keys of a watched layer.
        heads: Number of the first heads that learn it.
        targets: One patch of each counted object, among the V visual tokens shown ``(B, L, V)``.
    """
    query, key = (rows[:, :heads] for rows in queries_and_keys)
    shares = (query @ key.transpose(-1, -2)).log_softmax(-1).transpose(1, 2)
    rows = targets.any(-1)
    counted = targets[rows][:, None].float()
    first, patches = shares[rows].split([len(PREFIX), targets.shape[-1]], dim=-1)
    objects = (patches * counted).sum(-1) + REST * first.logsumexp(-1)
    loss: torch.Tensor = -(objects / (counted.sum(-1) + REST)).mean()
    return loss
