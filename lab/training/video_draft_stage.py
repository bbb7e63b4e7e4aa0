"""Distils the video model into a draft with few language layers, often on part of the tokens.

The draft has the target's naming losses, and its last layer the target's attention loss.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lab.training.attention_loss import looking_loss
from lab.training.clip_features import ShownTokens, visual_tokens
from lab.training.dialogue_packs import IGNORE, Packed
from lab.training.fast_math import use_fast_products
from lab.training.language_losses import answer_loss
from lab.training.naming_losses import Namers
from lab.training.release_stage import load_exported
from lab.training.stage_runtime import Training, Worker
from lab.training.tower_stage import tower_of
from lab.training.video_lessons import Feed, Lesson
from lab.training.video_model import build_video_model, video_weights_dir
from lab.training.video_packs import video_hidden
from lab.training.video_stage import (
    learn,
    prepared,
    restarted_lr,
    stage_of,
    validate_video,
    video_target,
)

DRAFT_CHECKPOINT = "video_draft.pt"


def video_draft_from(target: Any, layers: list[int], start: str = "target") -> Any:
    """Builds a draft from the target's tower, projector, words and some of its layers, or loads a shipped one.

    Args:
        target: The target.
        layers: Layers of the target to take.
        start: "target", or the shipped draft to continue from.
    """
    if start != "target":
        return prepared(load_exported(video_weights_dir(start)))
    draft = build_video_model("seedling_video_draft", len(layers))
    source = target.state_dict()
    state = {}
    for key in draft.state_dict():
        wanted = key
        for number, layer in enumerate(layers):
            draft_name = f"language_model.layers.{number}."
            if draft_name in key:
                wanted = key.replace(draft_name, f"language_model.layers.{layer}.")
        state[key] = source[wanted]
    draft.load_state_dict(state)
    return prepared(draft)


def train_video_draft(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains the draft to agree with the target on answers; resumes from ``out/video_draft.pt``.

    At first it learns from correct answers, which is cheaper. The target always sees the whole clip, the draft in a
    share of the steps only part of it.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder with ``video.pt``.
    """
    plan, seed = {**recipe["video"], **recipe["video_draft"]}, recipe["seed"]
    torch.manual_seed(seed)
    target, namers = video_target(out), Namers()
    draft = video_draft_from(target, plan["target_layers"], plan["start"])
    use_fast_products(draft.model.multi_modal_projector, worker.device)
    use_fast_products(draft.model.language_model, worker.device)
    for module in (target, draft, namers):
        module.to(worker.device)

    def learn_lessons(step: int) -> dict[str, torch.Tensor]:
        sums: dict[str, torch.Tensor] = {}
        for lesson, features in islice(lessons, plan["parts"]):
            teacher = target if step >= plan["distilled_from"] else None
            learn(_losses(draft, teacher, namers, plan, lesson, features), plan, sums)
        return sums

    training = Training(
        worker,
        plan,
        out / DRAFT_CHECKPOINT,
        {"model": draft, "namers": namers},
        [*(p for p in draft.parameters() if p.requires_grad), *namers.parameters()],
        lr=lambda step: restarted_lr(step, plan),
        stage=stage_of("video_draft", plan),
    )
    lessons = Feed(worker, plan, seed).lessons(tower_of(draft), training.first_step)
    training.run(
        learn_lessons,
        plan["log_every"],
        lambda: [{"val": validate_video(draft, plan["validation"])}],
    )


def _losses(
    draft: Any,
    target: Any,
    namers: Namers,
    plan: dict[str, Any],
    lesson: Lesson,
    features: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Returns the loss terms of a lesson, including "target" if there are target logits."""
    shown_tokens, packed = lesson.shown_tokens, lesson.packed
    answered = packed.labels != IGNORE
    labels, weights = packed.labels[answered], packed.weights[answered]
    read = video_hidden(draft, visual_tokens(draft, shown_tokens), shown_tokens, packed)
    logits = draft.lm_head(read.words[answered])
    terms = namers.losses(draft, read, plan["named_after"], lesson.labels)
    terms["gaze"] = looking_loss(draft, read, plan["gaze"], lesson.looks)
    terms["answers"] = plan["answer_weight"] * answer_loss(logits, labels, weights)
    if target is not None:
        wanted = _wanted(target, features, shown_tokens, packed)
        distance = F.kl_div(
            logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        terms["target"] = (distance * weights).sum() / weights.sum()
    return terms


@torch.no_grad()
def _wanted(
    target: Any, features: torch.Tensor, shown_tokens: ShownTokens, packed: Packed
) -> torch.Tensor:
    """Returns the target's logits of the answers' words, given all tokens of the clips ``(B, N, 4, 128)``."""
    every = np.tile(np.arange(features.shape[1]), (len(features), 1))
    every_token = replace(shown_tokens, chosen=every, features=features.float())
    words = video_hidden(target, visual_tokens(target, every_token), every_token, packed).words
    logits: torch.Tensor = target.lm_head(words[packed.labels != IGNORE])
    return logits
