"""Stage 1: trains the vision tower to read class, colour and box from patches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.harness.seedling.scenes import Scenes
from lab.training.fast_math import tower_attention, use_attention, use_bf16_products
from lab.training.patch_targets import patch_targets
from lab.training.seedling_model import build_model, normalise
from lab.training.seedling_tower import TowerHeads, patch_features, pooled_output
from lab.training.stage_runtime import Training, Worker


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

    def learn(step: int) -> dict[str, torch.Tensor]:
        index = worker.share(step, plan["batch"], plan["first_index"])
        layout, images = scenes.batch("train", recipe["seed"], index, distort=True)
        hidden = patch_features(tower, normalise(images))
        losses = heads.losses(hidden, pooled_output(tower, hidden), layout, patch_targets(layout))
        torch.stack(
            [plan["weights"][name] * value for name, value in losses.items()]
        ).sum().backward()
        return losses

    def validate() -> Iterator[dict[str, Any]]:
        for split in ("val", "train"):
            accuracy = digit_accuracy(tower, heads, scenes, split, 256)
            yield {"split": split, "digit_accuracy": accuracy}

    modules = {"tower": tower, "heads": heads}
    parameters = [*tower.parameters(), *heads.parameters()]
    Training(worker, plan, out / "tower.pt", modules, parameters).run(learn, 200, validate)
