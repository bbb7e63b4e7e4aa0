"""Exports the model of crowded scenes and checks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.training.crowd_gaze import GAZE_ATTENTION, gaze_attention
from lab.training.crowd_lessons import validate_crowd
from lab.training.crowd_model import (
    build_crowd_model,
    crowd_weights_dir,
    save_crowd_model,
)
from lab.training.crowd_stage import CHECKPOINT
from lab.training.fast_math import use_attention
from lab.training.release_stage import LOG, load_exported, merged_log, record_sums
from lab.training.stage_runtime import load_checkpoint
from lab.training.tower_stage import tower_of


def export_crowd(recipe: dict[str, Any], out: Path, unfinished: bool = False) -> None:
    """Writes the trained model to the package's weights folder, with checksums and the log.

    Args:
        recipe: The whole recipe.
        out: Run folder.
        unfinished: Whether to use a checkpoint from before the last step too.

    Raises:
        SystemExit: If the run folder has no such checkpoint.
    """
    state = load_checkpoint(out / CHECKPOINT)
    if state is None or not (unfinished or state["step"] == recipe["crowd"]["steps"]):
        raise SystemExit(f"{out / CHECKPOINT}: not trained to the end; run the stage crowd first")
    model = build_crowd_model(recipe["crowd"].get("layers", 6))
    model.load_state_dict(state["model"])
    save_crowd_model(model, crowd_weights_dir())
    record_sums()
    LOG.write_text(merged_log(LOG, out / "log.jsonl"), encoding="utf-8")


def gate_crowd(recipe: dict[str, Any], split: str = "val") -> None:
    """Measures the shipped model and saves its scores next to the weights, in ``gate_crowd_SPLIT.json``.

    Args:
        recipe: The whole recipe.
        split: "val" while developing; "test" once, at the end.

    Raises:
        SystemExit: If a family misses its target.
    """
    plan = recipe["gate_crowd"]
    model = load_exported(crowd_weights_dir())
    use_attention(model.model.language_model, GAZE_ATTENTION, gaze_attention)
    scores = validate_crowd(model, tower_of(model), split, plan)
    rounded = {name: round(score, 4) for name, score in scores.items()}
    path = crowd_weights_dir().parent / f"gate_crowd_{split}.json"
    path.write_text(json.dumps(rounded, separators=(",", ":")) + "\n", encoding="utf-8")
    missed = [name for name, target in plan["targets"].items() if scores[name] < target]
    if missed:
        raise SystemExit(f"seedling_crowd misses its targets on {split}: {', '.join(missed)}")
