"""Stage 2: trains projector and language model on questions, with the tower frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from espalier.harness.seedling.scenes import Scenes
from lab.training.dialogue_packs import IGNORE, packed_hidden, use_packed_attention
from lab.training.fast_math import use_bf16_products
from lab.training.language_losses import (
    alignment_loss,
    answer_loss,
    make_batch,
    random_subset,
    validate,
)
from lab.training.seedling_model import build_model
from lab.training.stage_runtime import Training, Worker, load_checkpoint
from lab.training.tower_stage import tower_of

FORKS = ("subsets", "mixtures")
"""Branches that start from the fork and sometimes see only part of the visual tokens."""


def model_with_tower(name: str, tower_file: Path, init_range: float) -> Any:
    """Builds a model around the trained, frozen tower."""
    model = build_model(name, init_range)
    trained = load_checkpoint(tower_file)
    if trained is None:
        raise FileNotFoundError(f"{tower_file}: run the tower stage first")
    tower = tower_of(model)
    tower.load_state_dict(trained["tower"])
    tower.requires_grad_(False)
    use_packed_attention(model.model.language_model)
    return model


def fork_of(out: Path, branch: str) -> dict[str, Any] | None:
    """Returns where a branch begins if it has no checkpoint: at the fork, unless it is "full"."""
    if branch == "full" or (out / f"language_{branch}.pt").exists():
        return None
    fork = load_checkpoint(out / "language_fork.pt")
    if fork is None:
        raise FileNotFoundError(f"{out}/language_fork.pt: run the language stage first")
    return fork


def train_language(worker: Worker, recipe: dict[str, Any], out: Path, branch: str) -> None:
    """Trains one branch; resumes from its checkpoint.

    Branch "full" always shows all visual tokens. The branches of :data:`FORKS` show a subset in part
    of the batches, at the tokens' original positions.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder with ``tower.pt``.
        branch: "full" or one of :data:`FORKS`.
    """
    plan, seed = recipe["language"], recipe["seed"]
    torch.manual_seed(seed)
    scenes = Scenes()
    model = model_with_tower("seedling", out / "tower.pt", plan["init_range"])
    tower = tower_of(model)
    use_bf16_products(model.model.multi_modal_projector)
    use_bf16_products(model.model.language_model)
    gain = nn.Parameter(torch.tensor(1.0))

    def learn(step: int) -> dict[str, torch.Tensor]:
        few = step < plan["few_objects_until"] * plan["steps"]
        index = worker.share(step, plan["batch"], plan["first_index"])
        batch = make_batch(
            scenes, tower, "train", seed, index, plan, plan["weights"], 1 if few else 3
        )
        visual = model.model.multi_modal_projector(batch.features)
        align = alignment_loss(model, visual, batch.targets, gain)
        positions = None
        if branch in FORKS:
            inside = batch.targets.owner >= 0
            visual, positions = maybe_subset(visual, inside, plan[branch], seed, step)
        hidden = packed_hidden(model, visual, batch.packed, positions)
        answered = batch.packed.labels != IGNORE
        logits = model.lm_head(hidden[answered])
        loss = answer_loss(logits, batch.packed.labels[answered], batch.packed.weights[answered])
        (loss + plan["align"] * align).backward()
        return {"loss": loss, "align": align}

    def fork(step: int) -> None:
        if worker.leads and step + 1 == plan["fork_at"]:
            training.save(step + 1, out / "language_fork.pt")

    training = Training(
        worker,
        plan,
        out / f"language_{branch}.pt",
        {"model": model, "gain": nn.ParameterList([gain])},
        [*(p for p in model.parameters() if p.requires_grad), gain],
        start=fork_of(out, branch),
    )
    training.run(
        learn, 100, lambda: [{"val": validate(model, tower, scenes, "val", 96)}], after=fork
    )


def maybe_subset(
    visual: torch.Tensor, inside: np.ndarray, plan: dict[str, Any], seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Drops visual tokens in a share of the steps, the same steps in every worker.

    Args:
        visual: Projected visual tokens ``(B, N, D)``.
        inside: Which tokens lie on an object ``(B, N)``.
        plan: The branch's part of the recipe.
        seed: Recipe seed.
        step: Number of the step.

    Returns:
        The tokens ``(B, V, D)`` and, where some were dropped, their position ids ``(B, V)``.
    """
    rng = np.random.default_rng([seed, 99, step])
    if rng.random() >= plan["share"]:
        return visual, None
    return random_subset(visual, inside, int(rng.integers(*plan["keep"])), plan["tilt"], rng)
