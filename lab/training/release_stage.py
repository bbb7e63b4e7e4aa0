"""The last stages: exports the trained models and checks them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from espalier.harness.seedling import weights_dir
from espalier.harness.seedling.vocabulary import MASK
from lab.training.greedy_scores import (
    QuestionSet,
    Scores,
    agreement,
    objects_first_keep,
    random_keep,
)
from lab.training.language_stage import FORKS
from lab.training.seedling_model import DENOISER, NAMES, build_model, file_sha256, save_model
from lab.training.stage_runtime import load_checkpoint


@dataclass(frozen=True)
class Source:
    """Source of a shipped model.

    Attributes:
        file: Checkpoint in the run folder.
        stage: The recipe's stage that writes it.
        weights: The checkpoint's entry that is shipped.
        config: Entries of its config.json besides the architecture.
    """

    file: str
    stage: str
    weights: str = "model"
    config: dict[str, Any] = field(default_factory=dict)


SOURCES = {
    "seedling": Source("language_mixtures.pt", "language"),
    "seedling_full": Source("language_full.pt", "language"),
    "seedling_draft": Source("draft.pt", "draft"),
    DENOISER: Source("denoising.pt", "denoising", "average", {"mask_token_id": MASK}),
}
SUMS = weights_dir().parent / "SHA256SUMS"
LOG = weights_dir().parent / "training_log.jsonl"


def export(recipe: dict[str, Any], out: Path, unfinished: bool = False) -> None:
    """Writes the trained models to the package's weights folder, with checksums and the log.

    Models with a missing checkpoint, or an unfinished one that was not requested, keep their present files.

    Args:
        recipe: The whole recipe.
        out: Run folder.
        unfinished: Whether to use checkpoints from before the stage's last step too.
    """
    exported = []
    for name, source in SOURCES.items():
        state = load_checkpoint(out / source.file)
        if state is not None and (unfinished or state["step"] == recipe[source.stage]["steps"]):
            export_model(name, state[source.weights], weights_dir(name), source.config)
            exported.append(name)
    record_sums()
    if exported and (out / "log.jsonl").exists():
        LOG.write_text(merged_log(LOG, out / "log.jsonl"), encoding="utf-8")


def record_sums() -> None:
    """Writes the checksums of all shipped weights, including the video models'."""
    files = sorted(SUMS.parent.glob("*/model.safetensors"))
    lines = [f"{file_sha256(file)}  {file.parent.name}/{file.name}" for file in files]
    SUMS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def merged_log(recorded: Path, new: Path) -> str:
    """Returns a new log's lines, preceded by those of recorded stages that it does not contain."""
    lines = new.read_text(encoding="utf-8").splitlines(keepends=True)
    stages = {json.loads(line)["stage"] for line in lines}
    old = (
        recorded.read_text(encoding="utf-8").splitlines(keepends=True) if recorded.exists() else []
    )
    return "".join([line for line in old if json.loads(line)["stage"] not in stages] + lines)


def export_model(
    name: str,
    state: dict[str, torch.Tensor],
    folder: Path,
    config: dict[str, Any] | None = None,
) -> None:
    """Writes one trained model as a Hugging Face folder, with additional config entries."""
    model = build_model(name)
    model.load_state_dict(state)
    model.config.update(config or {})
    save_model(model, folder)


def load_exported(folder: Path) -> Any:
    """Loads a model folder in float32 and checks that every weight was present.

    Raises:
        RuntimeError: If a weight was missing or unknown; transformers would only warn.
    """
    # The model classes take seconds to import, and only exported models need them.
    from transformers import AutoModelForImageTextToText

    from espalier.harness.models.loader import pretrained

    loaded: Any = pretrained(
        AutoModelForImageTextToText, folder, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    if report["missing_keys"] or report["unexpected_keys"]:
        raise RuntimeError(f"{folder}: weights do not fit: {report}")
    return model.eval()


def measure(model: Any, plan: dict[str, Any], split: str) -> dict[str, Scores]:
    """Scores a model with all visual tokens and with subsets before the first layer.

    Args:
        model: The model.
        plan: The recipe's "gate".
        split: "val" or "test".

    Returns:
        Scores by setting: "all", "random 36", "objects first 36" and so on.
    """
    results = {"all": QuestionSet(model, split, plan["scenes"], plan["questions"]).scores(model)}
    few = QuestionSet(model, split, plan["subset_scenes"], plan["questions"])
    for count in plan["keep"]:
        for name, choose in (("random", random_keep), ("objects first", objects_first_keep)):
            results[f"{name} {count}"] = few.scores(model, choose(split, few.index, count))
    return results


def gate(recipe: dict[str, Any], out: Path, split: str = "val") -> None:
    """Measures the shipped models and, on "val", the other finished branches.

    Scores are saved next to the weights, in ``gate_SPLIT.json``.

    Args:
        recipe: The whole recipe.
        out: Run folder.
        split: "val" while developing; "test" once, at the end.

    Raises:
        SystemExit: If the shipped target misses a target of the recipe.
    """
    plan = recipe["gate"]
    folders = {name: weights_dir(name) for name in NAMES}
    if split == "val":  # branches are chosen during development
        folders |= unshipped_branches(recipe, out)
    models = {name: load_exported(folder) for name, folder in folders.items()}
    results = {name: measure(model, plan, split) for name, model in models.items()}
    questions = QuestionSet(models["seedling"], split, plan["subset_scenes"], plan["questions"])
    agreed = agreement(models["seedling"], models["seedling_draft"], questions)
    results["seedling_draft"]["agreement"] = agreed
    path = weights_dir().parent / f"gate_{split}.json"
    path.write_text(json.dumps(rounded(results), separators=(",", ":")) + "\n", encoding="utf-8")
    missed = missed_targets(results["seedling"]["all"], plan["targets"])
    if missed:
        raise SystemExit(f"seedling misses its targets on {split}: {', '.join(missed)}")


def unshipped_branches(recipe: dict[str, Any], out: Path) -> dict[str, Path]:
    """Exports the finished branches that are not shipped, for comparison."""
    folders = {}
    for branch in FORKS:
        file = f"language_{branch}.pt"
        shipped = file in (source.file for source in SOURCES.values())
        state = None if shipped else load_checkpoint(out / file)
        if state is not None and state["step"] == recipe["language"]["steps"]:
            folders[branch] = out / "candidates" / branch
            export_model("seedling", state["model"], folders[branch])
    return folders


def rounded(results: dict[str, dict[str, Scores]]) -> dict[str, dict[str, Scores]]:
    """Returns scores with four decimals, which keeps their files small."""
    return {
        model: {
            setting: {name: (round(mean, 4), count) for name, (mean, count) in scores.items()}
            for setting, scores in settings.items()
        }
        for model, settings in results.items()
    }


def missed_targets(scores: Scores, targets: dict[str, float]) -> list[str]:
    """Returns the families, "vqa" included, with a score below their target."""
    return [
        f"{name} {value:.3f} < {targets[name]}"
        for name, value in summary(scores).items()
        if name in targets and value < targets[name]
    ]


def summary(scores: Scores) -> dict[str, float]:
    """Returns the score per family, and "vqa": the mean of attr, exist and count."""
    means = {name: mean for name, (mean, _) in scores.items() if "/" not in name}
    means["vqa"] = sum(means[name] for name in ("attr", "exist", "count")) / 3
    return means
