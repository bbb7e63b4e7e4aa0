"""Trains the model of crowded scenes from the shipped ``seedling``: projector and decoder, with the tower frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from espalier.harness.seedling import weights_dir
from lab.training.crowd_gaze import (
    GAZE_ATTENTION,
    Watched,
    counting_loss,
    counting_targets,
    gaze_attention,
    gaze_loss,
    gaze_targets,
)
from lab.training.crowd_lessons import (
    CrowdLesson,
    TokenNamer,
    crowd_hidden,
    digit_order,
    make_lesson,
    validate_crowd,
)
from lab.training.crowd_model import build_crowd_model
from lab.training.crowd_start import start_from_seedling
from lab.training.dialogue_packs import IGNORE, PREFIX
from lab.training.fast_math import use_attention, use_bf16_products
from lab.training.language_losses import answer_loss
from lab.training.language_stage import maybe_subset
from lab.training.release_stage import load_exported
from lab.training.stage_runtime import Training, Worker, cosine_lr
from lab.training.tower_stage import tower_of

CHECKPOINT = "crowd.pt"
TERMS = ("loss", "place", "order", "gaze", "counting")


def new_crowd_model(layers: int = 6) -> Any:
    """Returns the model for the start of training, with packed attention and a frozen tower.

    Args:
        layers: Number of language layers; other than 6 for tests, at random.
    """
    model: Any = build_crowd_model(layers)
    if layers == 6:
        start_from_seedling(model, load_exported(weights_dir("seedling")))
    tower_of(model).requires_grad_(False)
    use_attention(model.model.language_model, GAZE_ATTENTION, gaze_attention)
    return model


def phase_of(step: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe's phase of a step, with the number of its first step as "start"."""
    start = 0
    for phase in plan["phases"]:
        if step < phase["until"]:
            break
        start = phase["until"]
    return {**phase, "start": start}


def phase_lr(step: int, plan: dict[str, Any]) -> float:
    """Returns the learning rate of a step: in each phase a cosine of its own, which may end before the cosine does."""
    phase = phase_of(step, plan)
    return cosine_lr(step - phase["start"], phase["cosine"], plan["warmup"], phase["lr"])


def looking_losses(
    watched: Watched, lesson: CrowdLesson, positions: torch.Tensor | None, plan: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses of looking and of counting.

    Args:
        watched: Queries and keys of the watched layers.
        lesson: The lesson.
        positions: Position ids ``(B, V)`` of the visual tokens shown; None means all.
        plan: The recipe's "gaze".
    """
    about = (lesson.packed, lesson.questions, lesson.objects)
    targets = torch.cat([gaze_targets(*about, lesson.owner), counting_targets(*about)[None]])
    if positions is not None:
        numbers = (positions - len(PREFIX))[None, :, None].expand(3, -1, targets.shape[2], -1)
        targets = targets.gather(-1, numbers)
    gaze = gaze_loss(watched, plan["layers"], plan["heads"], targets[:2])
    return gaze, counting_loss(watched.attention[plan["count_layer"]], plan["heads"], targets[2])


def train_crowd(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains the model; resumes from ``out/crowd.pt``.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder.
    """
    plan, seed = recipe["crowd"], recipe["seed"]
    torch.manual_seed(seed)
    model, namer = new_crowd_model(plan.get("layers", 6)), TokenNamer()
    tower, projector = tower_of(model), model.model.multi_modal_projector
    use_bf16_products(projector)
    use_bf16_products(model.model.language_model)

    def learn(step: int) -> dict[str, torch.Tensor]:
        phase = phase_of(step, plan)
        index = worker.share(step, plan["batch"], plan["first_index"])
        lesson = make_lesson(
            tower, "train", seed, index, phase["mix"], plan["weights"], plan["distort"]
        )
        packed, answered = lesson.packed, lesson.packed.labels != IGNORE
        inside = lesson.owner >= 0
        visual = projector(lesson.features)
        place = namer.place_loss(visual, inside)
        visual, positions = maybe_subset(visual, inside, plan["mixtures"], seed, step)
        looking = plan["gaze"]
        watched = Watched(dict.fromkeys([*looking["layers"], looking["count_layer"]]))
        hidden = crowd_hidden(model, visual, packed, positions, watched)
        logits = model.lm_head(hidden[answered])
        loss = answer_loss(logits, packed.labels[answered], packed.weights[answered])
        gaze, counting = looking_losses(watched, lesson, positions, looking)
        order = digit_order(lesson.objects, lesson.owner)
        if positions is not None:
            order = order.gather(1, positions - len(PREFIX))
        tokens = watched.states[looking["layers"][-1]][:, len(PREFIX) :][:, : order.shape[1]]
        ordinal = namer.order_loss(tokens, order)
        total = loss + plan["place"] * place + plan["order"] * ordinal
        (total + looking["weight"] * (gaze + counting)).backward()
        return dict(zip(TERMS, (loss, place, ordinal, gaze, counting), strict=True))

    Training(
        worker,
        plan,
        out / CHECKPOINT,
        {"model": model, "namer": namer},
        [*(p for p in model.parameters() if p.requires_grad), *namer.parameters()],
        lr=lambda step: phase_lr(step, plan),
    ).run(
        learn,
        plan["log_every"],
        lambda: [{"val": validate_crowd(model, tower, "val", plan["validation"])}],
    )
