"""Stage 1: trains the vision tower to read class, colour and box from patches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.harness.seedling.scenes import Scenes
from lab.training.fast_math import tower_attention, use_attention, use_bf16_products
from lab.training.patch_targets import patch_targets
from lab.training.seedling_model import build_model, normalise
from lab.training.seedling_tower import TowerHeads, patch_features, pooled_output
from lab.training.stage_runtime import (
    TrainingLog,
    Worker,
    cosine_lr,
    load_checkpoint,
    make_optimiser,
    save_checkpoint,
    set_lr,
)


def tower_of(model: Any) -> Any:
    """Returns the CLIP encoder of a LLaVA model, whichever way transformers nests it."""
    tower = model.model.vision_tower
    return getattr(tower, "vision_model", tower)


@torch.no_grad()
def digit_accuracy(
    tower: Any, heads: TowerHeads, scenes: Scenes, split: str, scene_count: int
) -> float:
    """Returns the share of digit objects that the votes of their patches classify right."""
    right = total = 0
    for start in range(0, scene_count, 32):
        layout, images = scenes.batch(split, 0, np.arange(start, start + 32))
        hidden = patch_features(tower, normalise(images))
        predicted, true = heads.digit_votes(hidden, layout, patch_targets(layout))
        right, total = right + int((predicted == true).sum()), total + len(true)
    return right / total


def train_tower(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains the tower; resumes from ``out/tower.pt``.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder.
    """
    plan = recipe["tower"]
    torch.manual_seed(recipe["seed"])
    tower, heads, scenes = tower_of(build_model()), TowerHeads(), Scenes()
    use_bf16_products(tower)
    use_attention(tower, "seedling_tower", tower_attention)
    parameters = [*tower.parameters(), *heads.parameters()]
    optimiser = make_optimiser(parameters, plan["lr"], plan["betas"], plan["weight_decay"])
    log = TrainingLog(out / "log.jsonl", "tower")
    checkpoint = load_checkpoint(out / "tower.pt")
    first_step = 0
    if checkpoint:
        tower.load_state_dict(checkpoint["tower"])
        heads.load_state_dict(checkpoint["heads"])
        optimiser.load_state_dict(checkpoint["optimiser"])
        first_step = checkpoint["step"]
    for step in range(first_step, plan["steps"]):
        set_lr(optimiser, cosine_lr(step, plan["steps"], plan["warmup"], plan["lr"]))
        index = worker.share(step, plan["batch"], plan["first_index"])
        layout, images = scenes.batch("train", recipe["seed"], index, distort=True)
        hidden = patch_features(tower, normalise(images))
        pooled = pooled_output(tower, hidden)
        losses = heads.losses(hidden, pooled, layout, patch_targets(layout))
        loss = sum(plan["weights"][name] * value for name, value in losses.items())
        optimiser.zero_grad()
        loss.backward()
        worker.average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()

        done = step + 1
        if not worker.leads:
            continue
        if done % 200 == 0:
            log.write(step=done, **{name: value.item() for name, value in losses.items()})
        if done % plan["validate_every"] == 0 or done == plan["steps"]:
            for split in ("val", "train"):
                accuracy = digit_accuracy(tower, heads, scenes, split, 256)
                log.write(step=done, split=split, digit_accuracy=accuracy)
        if done % plan["save_every"] == 0 or done == plan["steps"]:
            state = {"tower": tower.state_dict(), "heads": heads.state_dict(), "step": done}
            save_checkpoint(out / "tower.pt", {**state, "optimiser": optimiser.state_dict()})
