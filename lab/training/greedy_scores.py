"""Greedy answers and scores of a model, with all visual tokens or a subset before the first layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from espalier.harness.seedling.counter_random import draws
from espalier.harness.seedling.scene_benchmarks import (
    box_score,
    caption_score,
    exact_match,
    reading_score,
)
from espalier.harness.seedling.scene_questions import SceneQuestion, ask, question_streams
from espalier.harness.seedling.scenes import SceneLayout, SceneObject, Scenes
from espalier.harness.seedling.vocabulary import ASSISTANT, EOS, PAD, VOCABULARY, encode
from lab.training.dialogue_packs import (
    IGNORE,
    PREFIX,
    TEXT_START,
    pack,
    packed_hidden,
    use_packed_attention,
)
from lab.training.patch_targets import patch_targets
from lab.training.seedling_model import VISUAL_TOKENS, normalise
from lab.training.seedling_tower import patch_features
from lab.training.tower_stage import tower_of

MAX_NEW_TOKENS = {"attr": 3, "exist": 3, "count": 3, "rec": 6, "ocr": 8, "caption": 80}
RANDOM_SEED = 12345
BATCH = 64
"""Questions per batch."""
Scores = dict[str, tuple[float, int]]
Keep = Callable[[SceneLayout], np.ndarray]
"""Chooses the visual tokens of B scenes to keep: sorted numbers ``(B, k)``."""
Decode = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, int], list[str]]
"""Answers questions of equal length, as :func:`greedy_answers` does."""


def random_keep(split: str, index: Iterable[int], count: int) -> Keep:
    """Returns a selector of random tokens, fixed by split and scene index."""
    order = draws(RANDOM_SEED, split, list(index), VISUAL_TOKENS).argsort(axis=1)
    return lambda layout: np.sort(order[:, :count], axis=1)


def objects_first_keep(split: str, index: Iterable[int], count: int) -> Keep:
    """Returns a selector of the tokens with the largest part of an object, then random background.

    It uses the ground truth of the scene but not the question, so it is not an upper bound.
    """
    ties = draws(RANDOM_SEED, split, list(index), VISUAL_TOKENS).argsort(axis=1).argsort(axis=1)

    def keep(layout: SceneLayout) -> np.ndarray:
        score = patch_targets(layout).overlap * VISUAL_TOKENS + ties
        return np.sort(np.argsort(-score, axis=1)[:, :count], axis=1)

    return keep


@dataclass
class SceneEntry:
    """A question with the row of its scene in the batch and the scene's objects."""

    row: int
    question: SceneQuestion
    objects: tuple[SceneObject, ...]


def score_answer(entry: SceneEntry, answer: str) -> float:
    """Returns the headline score of one answer in 0..1."""
    question = entry.question
    if question.family == "rec" and question.target is not None:
        return float(box_score(answer, question.target.box)[0] >= 0.5)
    if question.family == "ocr":
        return reading_score(answer, question.answer)
    if question.family == "caption":
        return caption_score(answer, entry.objects)["object_recall"]
    return exact_match(answer, question.answer)


@torch.no_grad()
def greedy_answers(
    model: Any,
    visual: torch.Tensor,
    positions: torch.Tensor,
    questions: torch.Tensor,
    max_new_tokens: int,
) -> list[str]:
    """Decodes greedily from visual tokens at given positions.

    Args:
        model: A LLaVA model with ordinary attention.
        visual: Projected visual tokens ``(B, V, D)``.
        positions: Their position ids ``(B, V)``.
        questions: Question ids of equal length, ending in ``ASSISTANT:`` ``(B, Q)``.
        max_new_tokens: Maximum tokens per answer.

    Returns:
        The answers as words, without ``<eos>``.
    """
    # transformers takes half a second to import, and most of this file does not need it.
    from transformers import DynamicCache

    language = model.model.language_model
    batch, length = questions.shape
    start = language.embed_tokens(torch.tensor(PREFIX)).expand(batch, -1, -1)
    embeds = torch.cat([start, visual, language.embed_tokens(questions)], dim=1)
    first = torch.arange(len(PREFIX)).expand(batch, -1)
    last = torch.arange(TEXT_START, TEXT_START + length).expand(batch, -1)
    position_ids = torch.cat([first, positions, last], dim=1)
    cache = DynamicCache(config=language.config)
    tokens: list[torch.Tensor] = []
    finished = torch.zeros(batch, dtype=torch.bool)
    for number in range(max_new_tokens):
        hidden = language(
            inputs_embeds=embeds,
            attention_mask=torch.ones(batch, cache.get_seq_length() + embeds.shape[1]),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        token = model.lm_head(hidden[:, -1]).argmax(-1).masked_fill(finished, PAD)
        tokens.append(token)
        finished |= token == EOS
        if finished.all():
            break
        embeds = language.embed_tokens(token)[:, None]
        position_ids = torch.full((batch, 1), TEXT_START + length + number)
    rows = torch.stack(tokens, dim=1).tolist()
    return [" ".join(VOCABULARY[t] for t in row if t not in (EOS, PAD)) for row in rows]


class QuestionSet:
    """Questions about the first scenes of a split, with the tower's features computed once."""

    def __init__(
        self,
        model: Any,
        split: str,
        scene_count: int,
        counts: dict[str, int],
        seed: int = 0,
        first: int = 0,
    ) -> None:
        """Draws scenes and questions.

        Args:
            model: The model that gives tower and projector.
            split: "val" or "test".
            scene_count: Number of scenes.
            counts: Questions per family and scene.
            seed: Scene seed.
            first: Index of the first scene.
        """
        self.split = split
        self.index = list(range(first, first + scene_count))
        self.layout, images = Scenes().batch(split, seed, self.index)
        streams = question_streams(split, seed, self.index)
        self.entries = []
        for row, stream in enumerate(streams):
            objects = self.layout.objects(row)
            self.entries += [SceneEntry(row, q, objects) for q in ask(objects, stream, counts)]
        chunks = normalise(images).split(64)
        with torch.no_grad():
            tower = tower_of(model)
            self.features = torch.cat([patch_features(tower, chunk)[:, 1:] for chunk in chunks])
            self.visual = model.model.multi_modal_projector(self.features)

    def answers(
        self,
        model: Any,
        keep: Keep | None = None,
        decode: Decode = greedy_answers,
        rooms: Mapping[str, int] = MAX_NEW_TOKENS,
    ) -> list[str]:
        """Answers every question, one answer per entry of ``entries``.

        Args:
            model: The model.
            keep: Selector of the visual tokens to keep, or None for all.
            decode: Decoding function of the model.
            rooms: Maximum tokens of an answer, by family.
        """
        visual, kept = self.visual, np.tile(np.arange(VISUAL_TOKENS), (len(self.index), 1))
        if keep is not None:
            kept = keep(self.layout)
        positions = torch.from_numpy(kept)
        visual = torch.gather(visual, 1, positions[..., None].expand(-1, -1, visual.shape[-1]))
        groups: dict[tuple[str, int], list[tuple[int, list[int]]]] = defaultdict(list)
        for place, entry in enumerate(self.entries):
            ids = [*encode(entry.question.text), ASSISTANT]
            groups[entry.question.family, len(ids)].append((place, ids))
        answers = [""] * len(self.entries)
        for (family, _), items in groups.items():
            for start in range(0, len(items), BATCH):
                part = items[start : start + BATCH]
                rows = torch.tensor([self.entries[place].row for place, _ in part])
                words = torch.tensor([ids for _, ids in part])
                seats = positions[rows] + len(PREFIX)
                batch_answers = decode(model, visual[rows], seats, words, rooms[family])
                for (place, _), answer in zip(part, batch_answers, strict=True):
                    answers[place] = answer
        return answers

    def scores(
        self,
        model: Any,
        keep: Keep | None = None,
        decode: Decode = greedy_answers,
        rooms: Mapping[str, int] = MAX_NEW_TOKENS,
    ) -> Scores:
        """Returns (mean score, number of questions) per family and per "family/template"."""
        answers = self.answers(model, keep, decode, rooms)
        scores: dict[str, list[float]] = defaultdict(list)
        for entry, answer in zip(self.entries, answers, strict=True):
            score = score_answer(entry, answer)
            scores[entry.question.family].append(score)
            scores[f"{entry.question.family}/{entry.question.template}"].append(score)
        return {name: (float(np.mean(s)), len(s)) for name, s in sorted(scores.items())}


@torch.no_grad()
def agreement(target: Any, draft: Any, questions: QuestionSet) -> Scores:
    """Returns the share of the target's greedy tokens that the draft predicts, per family.

    Args:
        target: The model that gives the greedy answers.
        draft: The model that predicts them; switched to packed attention.
        questions: Questions created with the target.

    Returns:
        (share of tokens, number of tokens) per family, ``<eos>`` included.
    """
    answers = questions.answers(target)
    rows: list[list[SceneQuestion]] = [[] for _ in questions.index]
    for entry, answer in zip(questions.entries, answers, strict=True):
        rows[entry.row].append(replace(entry.question, answer=answer))
    packed = pack(rows, dict.fromkeys([*MAX_NEW_TOKENS, "end"], 1.0))
    use_packed_attention(draft.model.language_model)
    projected = draft.model.multi_modal_projector(questions.features)
    guess = draft.lm_head(packed_hidden(draft, projected, packed)).argmax(-1)
    hits: dict[str, list[float]] = defaultdict(list)
    for line, items in enumerate(rows):
        for number, question in enumerate(items):
            spot = (packed.segments[line] == number) & (packed.labels[line] != IGNORE)
            equal = guess[line][spot] == packed.labels[line][spot]
            hits[question.family] += equal.float().tolist()
    return {name: (float(np.mean(s)), len(s)) for name, s in sorted(hits.items())}
