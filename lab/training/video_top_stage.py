"""Trains the last layers of the video model alone, with heads that look for nothing but times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.training.attention_loss import time_heads_loss
from lab.training.clip_features import visual_tokens
from lab.training.stage_runtime import TrainingLog, Worker, set_lr
from lab.training.tower_stage import tower_of
from lab.training.video_lessons import Feed, Lesson
from lab.training.video_packs import Read, video_hidden
from lab.training.video_stage import (
    CHECKPOINT,
    TOP_CHECKPOINT,
    new_model,
    stage_of,
    train_stage,
    video_target,
)


def train_video_top(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains the last layers of the video model, the others frozen; resumes from ``out/video_top.pt``.

    What lies below costs a forward pass only: with two layers a step takes half the time of one of the whole model,
    although each of its clips is drawn for it alone.

    Its heads for times begin as copies of another and are fitted first. Where the recipe fits none, the model has them:
    that of ``video.pt``, and where there is no such file the shipped one.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder; where heads are fitted, ``video.pt`` is in it.
    """
    plan, seed = {**recipe["video"], **recipe["video_top"]}, recipe["seed"]
    torch.manual_seed(seed)
    if plan["fit"] or (out / CHECKPOINT).exists():
        model = video_target(out, [CHECKPOINT]).to(worker.device)
    else:
        model = new_model(plan["start"]).requires_grad_(False).eval().to(worker.device)
    if plan["fit"] and not (out / TOP_CHECKPOINT).exists():
        for layer, heads in time_heads_of(plan).items():
            share_head(model, layer, heads)
        log = TrainingLog(out / "log.jsonl", stage_of("video_top", plan))
        fit_time_heads(worker, model, plan, seed, log)
    for layer in plan["layers"]:
        model.model.language_model.layers[layer].requires_grad_(True)
    train_stage(worker, model, plan, seed, out, "video_top")


def fit_time_heads(
    worker: Worker, model: Any, plan: dict[str, Any], seed: int, log: TrainingLog
) -> None:
    """Fits queries and keys of the heads for times to what the layers hold of some clips, with all else frozen.

    Thousands of steps on the same states take two minutes. Without them the heads' loss was half as high again after
    200 steps of the stage, though what is answered was no worse (docs/log/training.md).

    Args:
        worker: This process.
        model: The model; its other parts stay as they are.
        plan: The recipe's part; "fit" has clips of each worker, where they begin, steps, clips a step and rate.
        seed: The recipe's seed.
        log: Where the loss is written to.
    """
    fit, layers = plan["fit"], time_heads_of(plan)
    lessons = Feed(worker, {**plan, "first_index": fit["first_index"]}, seed)
    states = [
        (_layer_states(model, lesson, layers), lesson.times)
        for lesson, _ in islice(lessons.lessons(tower_of(model), 0), fit["clips"])
    ]
    attentions = [model.model.language_model.layers[layer].self_attn for layer in layers]
    learned = [
        weight.requires_grad_(True)
        for attention in attentions
        for projection in (attention.q_proj, attention.k_proj)
        for weight in projection.parameters()
    ]
    optimiser = torch.optim.Adam(learned, betas=(0.9, 0.99))
    draw = np.random.default_rng([seed, 82, worker.rank])
    total = 0.0
    for step in range(fit["steps"]):
        set_lr(optimiser, fit["lr"] * (1 - step / fit["steps"]))
        optimiser.zero_grad()
        for number in draw.integers(len(states), size=fit["parts"]).tolist():
            loss = time_heads_loss(model, states[number][0], plan["time_heads"], states[number][1])
            (loss / fit["parts"]).backward()
            total += loss.item() / fit["parts"]
        worker.average_gradients(learned)
        optimiser.step()
        if worker.leads and (step + 1) % fit["log_every"] == 0:
            log.write(fitted=step + 1, times=total / fit["log_every"])
            total = 0.0


@torch.no_grad()
def _layer_states(model: Any, lesson: Lesson, layers: Iterable[int]) -> Read:
    """Returns what stands in front of some layers, in 16 bit."""
    read = video_hidden(
        model, visual_tokens(model, lesson.shown_tokens), lesson.shown_tokens, lesson.packed
    )
    return replace(
        read, words=read.words[:, :0], layers={n: read.layers[n].bfloat16() for n in layers}
    )


def time_heads_of(plan: dict[str, Any]) -> dict[int, list[int]]:
    """Returns the heads that look for times alone, by layer."""
    heads: dict[int, list[int]] = {}
    for kind in plan["time_heads"].values():
        for layer, head in kind["heads"].items():
            heads.setdefault(layer, []).append(head)
    return heads


@torch.no_grad()
def share_head(model: Any, layer: int, heads: Sequence[int]) -> None:
    """Overwrites heads of a layer with its first one, and divides what that one adds among all of them.

    The sum is what the first head gave; what the overwritten ones gave is lost.
    """
    attention = model.model.language_model.layers[layer].self_attn
    size = attention.head_dim
    output = attention.o_proj.weight
    output[:, :size] /= 1 + len(heads)
    for head in heads:
        mine = slice(head * size, (head + 1) * size)
        output[:, mine] = output[:, :size]
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight[mine] = projection.weight[:size]
            projection.bias[mine] = projection.bias[:size]
