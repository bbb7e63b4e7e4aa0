"""Stage 3: distils the target into a draft with two language layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from espalier.harness.seedling.scenes import Scenes
from lab.training.dialogue_packs import IGNORE, packed_hidden, use_packed_attention
from lab.training.fast_math import use_bf16_products
from lab.training.language_losses import answer_loss, make_batch, validate
from lab.training.seedling_model import build_model
from lab.training.stage_runtime import Training, Worker, load_checkpoint
from lab.training.tower_stage import tower_of


def load_target(out: Path) -> Any:
    """Loads the trained target, frozen."""
    trained = load_checkpoint(out / "language_full.pt")
    if trained is None:
        raise FileNotFoundError(f"{out}/language_full.pt: run the language stage first")
    target = build_model("seedling")
    target.load_state_dict(trained["model"])
    use_packed_attention(target.model.language_model)
    return target.requires_grad_(False).eval()


def draft_from_target(target: Any, layers: list[int]) -> Any:
    """Builds a draft from the target's tower, projector, embeddings and some of its layers."""
    draft = build_model("seedling_draft")
    state = target.state_dict()
    wanted = {}
    for key in draft.state_dict():
        source = key
        for number, layer in enumerate(layers):
            draft_name, target_name = (
                f"language_model.layers.{number}.",
                f"language_model.layers.{layer}.",
            )
            if draft_name in key:
                source = key.replace(draft_name, target_name)
        wanted[key] = state[source]
    draft.load_state_dict(wanted)
    use_packed_attention(draft.model.language_model)
    tower_of(draft).requires_grad_(False)
    return draft


def train_draft(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains the draft to agree with the target on answer tokens; resumes from ``out/draft.pt``.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder with ``language_full.pt``.
    """
    plan, seed = recipe["draft"], recipe["seed"]
    weights = recipe["language"]["weights"]
    batch_plan = {"mixes": [plan["mix"]], "distort": recipe["language"]["distort"]}
    torch.manual_seed(seed)
    scenes, target = Scenes(), load_target(out)
    draft = draft_from_target(target, plan["target_layers"])
    tower = tower_of(draft)
    use_bf16_products(draft.model.multi_modal_projector)
    use_bf16_products(draft.model.language_model)

    def learn(step: int) -> dict[str, torch.Tensor]:
        index = worker.share(step, plan["batch"], plan["first_index"])
        batch = make_batch(scenes, tower, "train", seed, index, batch_plan, weights)
        answered = batch.packed.labels != IGNORE
        labels, label_weights = batch.packed.labels[answered], batch.packed.weights[answered]
        with torch.no_grad():
            visual = target.model.multi_modal_projector(batch.features)
            wanted = target.lm_head(packed_hidden(target, visual, batch.packed)[answered])
        visual = draft.model.multi_modal_projector(batch.features)
        logits = draft.lm_head(packed_hidden(draft, visual, batch.packed)[answered])
        distance = F.kl_div(
            logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        loss = (distance * label_weights).sum() / label_weights.sum()
        loss = loss + plan["answer_weight"] * answer_loss(logits, labels, label_weights)
        loss.backward()
        return {"loss": loss, "agreement": (logits.argmax(-1) == wanted.argmax(-1)).float().mean()}

    parameters = [p for p in draft.parameters() if p.requires_grad]
    training = Training(worker, plan, out / "draft.pt", {"model": draft}, parameters)
    training.run(learn, 100, lambda: [{"val": validate(draft, tower, scenes, "val", 96)}])
