"""Batches, losses and validation shared by the language stage and the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from espalier.harness.seedling.scene_questions import SceneQuestion, ask, question_streams
from espalier.harness.seedling.scenes import COLOUR_NAMES, SHAPES, SceneObject, Scenes
from espalier.harness.seedling.vocabulary import TOKEN_ID
from lab.training.dialogue_packs import IGNORE, PREFIX, Packed, pack, packed_hidden
from lab.training.drills import Drill, drills_for
from lab.training.patch_targets import PatchTargets, patch_targets
from lab.training.seedling_model import normalise
from lab.training.seedling_tower import patch_features


@dataclass
class Batch:
    """Images with their dialogues.

    Attributes:
        features: Tower features without the class token ``(B, N, D)``.
        targets: Patch labels.
        packed: The dialogues, packed.
        dialogues: The same dialogues, per image.
    """

    features: torch.Tensor
    targets: PatchTargets
    packed: Packed
    dialogues: list[list[SceneQuestion | Drill]]


@dataclass
class Drawn:
    """Images with questions about them.

    Attributes:
        features: Tower features without the class token ``(B, N, D)``.
        targets: Patch labels.
        objects: The objects of each image.
        questions: The questions about each image.
    """

    features: torch.Tensor
    targets: PatchTargets
    objects: list[tuple[SceneObject, ...]]
    questions: list[list[SceneQuestion]]


def draw(
    scenes: Scenes,
    tower: Any,
    split: str,
    seed: int,
    index: Sequence[int],
    plan: dict[str, Any],
    min_objects: int = 3,
) -> Drawn:
    """Draws scenes and questions about them and runs the frozen tower.

    Args:
        scenes: Scene source.
        tower: The vision tower.
        split: "train", "val" or "test".
        seed: Scene seed.
        index: Scene indices.
        plan: "mixes" (questions per family, used by images in turn), and optionally "distort".
        min_objects: Minimum number of objects in a scene.
    """
    layout, images = scenes.batch(
        split, seed, index, min_objects=min_objects, distort=plan.get("distort", False)
    )
    objects = [layout.objects(row) for row in range(len(index))]
    mixes = [plan["mixes"][int(number) % len(plan["mixes"])] for number in index]
    streams = question_streams(split, seed, index)
    questions = [ask(*about) for about in zip(objects, streams, mixes, strict=True)]
    with torch.no_grad():
        features = patch_features(tower, normalise(images))[:, 1:]
    return Drawn(features, patch_targets(layout), objects, questions)


def make_batch(
    scenes: Scenes,
    tower: Any,
    split: str,
    seed: int,
    index: Sequence[int],
    plan: dict[str, Any],
    weights: dict[str, float],
    min_objects: int = 3,
) -> Batch:
    """Draws a batch like :func:`draw`, with the drills of the plan, and packs it.

    Args:
        scenes: Scene source.
        tower: The vision tower.
        split: "train", "val" or "test".
        seed: Scene seed.
        index: Scene indices.
        plan: See :func:`draw`; optionally with "drills".
        weights: Loss weights, see :func:`pack`.
        min_objects: Minimum number of objects in a scene.
    """
    drawn = draw(scenes, tower, split, seed, index, plan, min_objects)
    dialogues: list[list[SceneQuestion | Drill]] = [
        list(questions) for questions in drawn.questions
    ]
    if "drills" in plan:
        rng = np.random.default_rng([seed, int(index[0])])
        for items, objects in zip(dialogues, drawn.objects, strict=True):
            items += drills_for(objects, rng, plan["drills"])
    return Batch(drawn.features, drawn.targets, pack(dialogues, weights), dialogues)


def alignment_loss(
    model: Any, visual: torch.Tensor, targets: PatchTargets, gain: torch.Tensor
) -> torch.Tensor:
    """Loss for naming the colour and kind of projected patches with the word embeddings.

    It replaces the language alignment of a CLIP tower.

    Args:
        model: The LLaVA model.
        visual: Projected visual tokens ``(B, N, D)``.
        targets: Patch labels.
        gain: Learned scale of the normalised patches.
    """
    label, colour = torch.from_numpy(targets.label), torch.from_numpy(targets.colour)
    inside = label > 0
    patches = visual[inside]
    patches = gain * patches * torch.rsqrt(patches.pow(2).mean(-1, keepdim=True) + 1e-6)
    words = model.model.language_model.embed_tokens.weight
    kinds = [TOKEN_ID[word] for word in (*map(str, range(10)), *SHAPES)]
    colours = [TOKEN_ID[word] for word in COLOUR_NAMES]
    return F.cross_entropy(patches @ words[kinds].T, label[inside] - 1) + F.cross_entropy(
        patches @ words[colours].T, colour[inside]
    )


def random_subset(
    visual: torch.Tensor, inside: np.ndarray, keep: int, tilt: float, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps random visual tokens in their order.

    Args:
        visual: Projected visual tokens ``(B, N, D)``.
        inside: Which tokens lie on an object ``(B, N)``.
        keep: Tokens to keep per image.
        tilt: Maximum preference for objects; each image draws one up to it. 0 is uniformly random
            and 1 goes up to objects first.
        rng: Source of choices.

    Returns:
        The kept tokens ``(B, keep, D)`` and their original position ids ``(B, keep)``.
    """
    score = rng.random(visual.shape[:2])
    score += tilt * rng.random((visual.shape[0], 1)) * inside
    order = np.argsort(-score, axis=1)
    chosen = torch.from_numpy(np.sort(order[:, :keep], axis=1))
    kept = torch.gather(visual, 1, chosen[..., None].expand(-1, -1, visual.shape[-1]))
    return kept, chosen + len(PREFIX)


def answer_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted mean cross-entropy of ``(T, vocabulary)`` logits."""
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()


@torch.no_grad()
def exact_answers(model: Any, batch: Batch) -> dict[str, list[bool]]:
    """Returns per "family/template" whether each greedy answer is exactly right.

    Every token is predicted after the correct answer so far. All of them being right is the same
    event as a correct greedy answer, at the cost of one forward pass.
    """
    visual = model.model.multi_modal_projector(batch.features)
    predicted = model.lm_head(packed_hidden(model, visual, batch.packed)).argmax(-1)
    return right_answers(predicted, batch.packed, batch.dialogues)


def right_answers(
    predicted: torch.Tensor, packed: Packed, dialogues: Sequence[Sequence[SceneQuestion | Drill]]
) -> dict[str, list[bool]]:
    """Returns per "family/template" whether all tokens of each answer are predicted ``(B, L)``."""
    labels = packed.labels
    wrong = (labels != IGNORE) & (predicted != labels)
    results: dict[str, list[bool]] = {}
    for row, items in enumerate(dialogues):
        bad = set(packed.segments[row][wrong[row]].tolist())
        for number, item in enumerate(items):
            if isinstance(item, SceneQuestion):
                results.setdefault(f"{item.family}/{item.template}", []).append(number not in bad)
    return results


def validate(
    model: Any, tower: Any, scenes: Scenes, split: str, scene_count: int
) -> dict[str, float]:
    """Returns exact-match accuracy per template over the first scenes of a split."""
    plan = {"mixes": [{"attr": 6, "exist": 5, "count": 2, "rec": 3, "ocr": 1, "caption": 1}]}
    weights = dict.fromkeys(["attr", "exist", "count", "rec", "ocr", "caption", "end"], 1.0)
    totals: dict[str, list[bool]] = {}
    for start in range(0, scene_count, 16):
        index = range(start, start + 16)
        batch = make_batch(scenes, tower, split, 0, index, plan, weights)
        for name, answers in exact_answers(model, batch).items():
            totals.setdefault(name, []).extend(answers)
    return {name: sum(answers) / len(answers) for name, answers in sorted(totals.items())}
