"""Lessons about crowded scenes: packed questions, the forward pass over them, and validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from espalier.harness.seedling.crowd import (
    GRID,
    LONGEST_NUMBER,
    ask,
    crowd_objects,
    draw_crowd,
    encode,
    question_stream,
)
from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.seedling.scenes import SceneObject
from lab.training.crowd_gaze import Watched
from lab.training.crowd_model import CROWD_TOKENS
from lab.training.dialogue_packs import PREFIX, Packed, pack
from lab.training.language_losses import right_answers
from lab.training.parted_attention import groups_of
from lab.training.patch_targets import crowd_targets
from lab.training.seedling_model import normalise
from lab.training.seedling_tower import patch_features

CROWD_TEXT_START = len(PREFIX) + CROWD_TOKENS


@dataclass
class CrowdLesson:
    """Crowded scenes with their questions.

    Attributes:
        features: Tower features without the class token ``(B, N, D)``.
        owner: Number of the object of each patch ``(B, N)``, -1 for none.
        packed: The questions, packed.
        questions: The same questions, per scene.
        objects: The objects of each scene.
    """

    features: torch.Tensor
    owner: np.ndarray
    packed: Packed
    questions: list[list[SceneQuestion]]
    objects: list[tuple[SceneObject, ...]]


def make_lesson(
    tower: Any,
    split: str,
    seed: int,
    index: Sequence[int],
    mix: dict[str, int],
    weights: dict[str, float],
    distort: bool = False,
) -> CrowdLesson:
    """Draws crowded scenes and different questions about each, and runs the frozen tower.

    Args:
        tower: The vision tower.
        split: "train", "val" or "test".
        seed: Scene seed.
        index: Scene indices.
        mix: Most questions per family and scene.
        weights: Loss weights, see :func:`pack`.
        distort: Distort the digits.
    """
    scenes = [crowd_objects(split, seed, number) for number in index]
    images, questions = [], []
    for number, objects in zip(index, scenes, strict=True):
        images.append(draw_crowd(split, seed, number, objects, distort))
        drawn = ask(objects, question_stream(split, seed, number), mix)
        questions.append(list({question.text: question for question in drawn}.values()))
    with torch.no_grad():
        features = patch_features(tower, normalise(np.stack(images)))[:, 1:]
    packed = pack(questions, weights, CROWD_TEXT_START, encode)
    return CrowdLesson(features, crowd_targets(scenes).owner, packed, questions, scenes)


def crowd_hidden(
    model: Any,
    visual: torch.Tensor,
    packed: Packed,
    positions: torch.Tensor | None = None,
    watched: Watched | None = None,
) -> torch.Tensor:
    """Runs the language model, with :func:`gaze_attention`, over a packed batch.

    Args:
        model: The model.
        visual: Projected visual tokens ``(B, V, D)``, perhaps a subset.
        packed: The questions.
        positions: Position ids ``(B, V)`` of a subset; None means all tokens in order.
        watched: Takes queries and keys of its layers, and all hidden states.

    Returns:
        Hidden states of the words ``(B, L, D)``.
    """
    language = model.model.language_model
    batch = visual.shape[0]
    start = language.embed_tokens(torch.tensor(PREFIX)).expand(batch, -1, -1)
    if positions is None:
        positions = torch.arange(len(PREFIX), CROWD_TEXT_START).expand(batch, -1)
    prefix = len(PREFIX) + visual.shape[1]
    first = torch.arange(len(PREFIX)).expand(batch, -1)
    output = language(
        inputs_embeds=torch.cat([start, visual, language.embed_tokens(packed.tokens)], dim=1),
        attention_mask=packed.mask(prefix),
        position_ids=torch.cat([first, positions, packed.positions], dim=1),
        use_cache=False,
        groups=groups_of(packed.segments),
        watched=watched,
        output_hidden_states=watched is not None,
    )
    if watched is not None:
        watched.states = output.hidden_states
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[:, prefix:]


class TokenNamer(nn.Module):
    """Names the column and row of a projected token, and in the decoder the place of a digit in its number.

    The tower reads quarters by themselves, so a place in the whole picture is new to projector and decoder. Digits are
    read in order: a word finds the next one if tokens know which one they are.
    """

    def __init__(self) -> None:
        """Starts at random."""
        super().__init__()
        self.place = nn.Linear(192, 2 * GRID)
        self.order = nn.Linear(192, LONGEST_NUMBER)

    def place_loss(self, visual: torch.Tensor, inside: np.ndarray) -> torch.Tensor:
        """Returns the cross-entropy of the tokens on objects; `visual` is ``(B, 576, D)``."""
        tokens = F.rms_norm(visual[torch.from_numpy(inside)], visual.shape[-1:], eps=1e-6)
        number = torch.from_numpy(np.nonzero(inside)[1])
        column, row = self.place(tokens).split(GRID, dim=-1)
        return F.cross_entropy(column, number % GRID) + F.cross_entropy(row, number // GRID)

    def order_loss(self, states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Returns the cross-entropy of the tokens on digits.

        Args:
            states: Hidden states of the visual tokens shown ``(B, V, D)``.
            order: Place of each token's digit in its number ``(B, V)``, -1 for none.
        """
        digits = order >= 0
        tokens = F.rms_norm(states[digits], states.shape[-1:], eps=1e-6)
        return F.cross_entropy(self.order(tokens), order[digits])


def digit_order(scenes: Sequence[Sequence[SceneObject]], owner: np.ndarray) -> torch.Tensor:
    """Returns the place in its number of each patch's digit ``(B, N)``, -1 for none; `owner` is likewise."""
    result = np.full(owner.shape, -1)
    for line, objects in enumerate(scenes):
        before: Counter[str] = Counter()
        for slot, item in enumerate(objects):
            if item.kind == "digit":
                result[line][owner[line] == slot] = before[item.colour]
                before[item.colour] += 1
    return torch.from_numpy(result)


@torch.no_grad()
def validate_crowd(model: Any, tower: Any, split: str, plan: dict[str, Any]) -> dict[str, float]:
    """Returns exact-match accuracy per family and template, and their mean over families.

    Args:
        model: The model.
        tower: Its tower.
        split: "val" or "test".
        plan: "scenes" and "mix".
    """
    weights = dict.fromkeys([*plan["mix"], "end"], 1.0)
    totals: dict[str, list[bool]] = {}
    for start in range(0, plan["scenes"], 16):
        index = range(start, min(start + 16, plan["scenes"]))
        lesson = make_lesson(tower, split, 0, index, plan["mix"], weights)
        visual = model.model.multi_modal_projector(lesson.features)
        predicted = model.lm_head(crowd_hidden(model, visual, lesson.packed)).argmax(-1)
        for name, right in right_answers(predicted, lesson.packed, lesson.questions).items():
            totals.setdefault(name, []).extend(right)
            totals.setdefault(name.split("/")[0], []).extend(right)
    scores = {name: sum(right) / len(right) for name, right in sorted(totals.items())}
    families = [score for name, score in scores.items() if "/" not in name]
    return {**scores, "mean": sum(families) / len(families)}
