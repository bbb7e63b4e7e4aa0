"""Stage 4: trains a copy of the shipped ``seedling`` to denoise masked answers, with the tower frozen."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.scene_questions import SceneQuestion
from espalier.harness.seedling.scenes import Scenes
from espalier.harness.seedling.vocabulary import MASK
from lab.training.denoising_answers import Sampler
from lab.training.dialogue_packs import IGNORE, PREFIX
from lab.training.fast_math import use_bf16_products
from lab.training.greedy_scores import QuestionSet
from lab.training.language_losses import draw
from lab.training.language_stage import maybe_subset
from lab.training.noised_batch import (
    Noised,
    denoising_loss,
    noise,
    text_hidden,
    use_denoising_attention,
)
from lab.training.release_stage import load_exported
from lab.training.stage_runtime import Training, Worker
from lab.training.tower_stage import tower_of

Rows = tuple[list[int], list[list[SceneQuestion]]]
"""Rows of dialogues, and the image number of each."""


def starting_model(folder: Path) -> Any:
    """Loads the model that denoising starts from; its mask token starts as the mean of all words."""
    model = load_exported(folder)
    words = model.model.language_model.embed_tokens.weight
    with torch.no_grad():
        words[MASK] = words.mean(0)
    use_denoising_attention(model.model.language_model)
    tower_of(model).requires_grad_(False)
    return model


def packed_rows(dialogues: Sequence[list[SceneQuestion]]) -> list[Rows]:
    """Puts all dialogues of an image into one row."""
    return [(list(range(len(dialogues))), list(dialogues))]


def single_rows(
    dialogues: Sequence[list[SceneQuestion]], short: int, captions: int, rng: np.random.Generator
) -> list[Rows]:
    """Draws dialogues for separate rows, with long ones grouped so that no row is mostly padding.

    Args:
        dialogues: The dialogues of each image.
        short: Most rows without a caption.
        captions: Most rows with one.
        rng: Source of the choice.
    """
    pairs = [(image, question) for image, row in enumerate(dialogues) for question in row]
    order = [pairs[number] for number in rng.permutation(len(pairs))]
    groups = []
    for wanted, limit in ((False, short), (True, captions)):
        chosen = [pair for pair in order if (pair[1].family == "caption") == wanted][:limit]
        if chosen:
            groups.append(([image for image, _ in chosen], [[question] for _, question in chosen]))
    return groups


def shown_alone(step: int, plan: dict[str, Any]) -> bool:
    """Whether a step has one dialogue per row: at intervals at first, later in every step.

    Packed rows are the cheapest to learn from. Single rows match the benchmarks, and using some from the
    start makes every checkpoint able to answer.
    """
    last = plan["alone_every"] - 1
    return bool(step >= plan["packed_until"] or step % plan["alone_every"] == last)


def masked_logits(
    model: Any,
    visual: torch.Tensor,
    batch: Noised,
    single: bool,
    visual_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the logits ``(T, vocabulary)`` of the T masked positions of a batch."""
    visible = batch.visible(len(PREFIX) + visual.shape[1], single)
    hidden = text_hidden(model, visual, batch.tokens, batch.positions, visible, visual_positions)
    logits: torch.Tensor = model.lm_head(hidden[batch.targets != IGNORE])
    return logits


def batch_loss(
    model: Any,
    visual: torch.Tensor,
    positions: torch.Tensor | None,
    parts: Sequence[Rows],
    plan: dict[str, Any],
    single: bool,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Noises all rows and returns their loss, a mean over the positions of all answers.

    Args:
        model: The model.
        visual: Projected visual tokens ``(B, V, D)`` of the images.
        positions: Position ids ``(B, V)`` of a subset, or None.
        parts: Groups of rows, each its own forward pass.
        plan: The recipe's "denoising".
        single: Whether each row is one dialogue, which the image sees.
        rng: Source of noise.
    """
    total, weight = torch.zeros(()), torch.zeros(())
    for images, rows in parts:
        batch = noise(rows, plan, rng)
        chosen = None if positions is None else positions[images]
        logits = masked_logits(model, visual[images], batch, single, chosen)
        total = total + denoising_loss(logits, batch, plan["clip"])
        weight = weight + batch.weights.sum()
    return total / weight


@torch.no_grad()
def move_average(average: Any, model: Any, step: int, decay: float) -> None:
    """Moves averaged weights towards the model's; the first steps weigh more, so the initial weights fade out."""
    share = 1 - min(decay, (1 + step) / (10 + step))
    pairs = [
        (mean, now)
        for mean, now in zip(average.parameters(), model.parameters(), strict=True)
        if now.requires_grad
    ]
    means, nows = zip(*pairs, strict=True)
    torch._foreach_lerp_(means, nows, share)


@torch.no_grad()
def validation(model: Any, tower: Any, scenes: Scenes, plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the loss over validation scenes under fixed noise, and scores of sampled answers.

    Both use one dialogue at a time, as in a benchmark.

    Args:
        model: The averaged model.
        tower: The vision tower.
        scenes: Scene source.
        plan: The recipe's "denoising"; "validation" sets the scenes and questions.
    """
    settings = plan["validation"]
    drawn = draw(scenes, tower, "val", 0, range(settings["scenes"]), {"mixes": plan["mixes"]})
    rng = np.random.default_rng(0)
    parts = single_rows(drawn.questions, 10 * settings["scenes"], settings["scenes"], rng)
    visual = model.model.multi_modal_projector(drawn.features)
    loss = batch_loss(model, visual, None, parts, plan, True, rng)
    results: dict[str, Any] = {"loss": loss.item()}
    questions = QuestionSet(model, "val", settings["scenes"], settings["questions"])
    for name, opened in (("full", True), ("prefix", False)):
        sampler = Sampler(settings["steps_per_token"], opened=opened)
        scores = questions.scores(model, None, sampler.decode, settings["rooms"])
        results[name] = {key: mean for key, (mean, _) in scores.items() if "/" not in key}
    return results


def train_denoising(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains from the shipped ``seedling``; resumes from ``out/denoising.pt``.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder.
    """
    plan, seed = recipe["denoising"], recipe["seed"]
    scenes, model = Scenes(), starting_model(weights_dir("seedling"))
    tower = tower_of(model)
    use_bf16_products(model.model.multi_modal_projector)
    use_bf16_products(model.model.language_model)
    average = copy.deepcopy(model).requires_grad_(False)

    def learn(step: int) -> dict[str, torch.Tensor]:
        single = shown_alone(step, plan)
        index = worker.share(step, plan["batch"], plan["first_index"])
        drawn = draw(scenes, tower, "train", seed, index, plan)
        rng = np.random.default_rng([seed, 7, step, worker.rank])
        parts = packed_rows(drawn.questions)
        if single:
            short, captions = (plan["alone"][key] // worker.count for key in ("short", "captions"))
            parts = single_rows(drawn.questions, short, captions, rng)
        visual = model.model.multi_modal_projector(drawn.features)
        inside = drawn.targets.owner >= 0
        visual, positions = maybe_subset(visual, inside, plan["mixtures"], seed, step)
        loss = batch_loss(model, visual, positions, parts, plan, single, rng)
        loss.backward()
        return {"loss": loss}

    modules = {"model": model, "average": average}
    parameters = [p for p in model.parameters() if p.requires_grad]
    Training(worker, plan, out / "denoising.pt", modules, parameters).run(
        learn,
        50,
        lambda: [{"val": validation(average, tower, scenes, plan)}],
        after=lambda step: move_average(average, model, step, plan["average"]),
    )
