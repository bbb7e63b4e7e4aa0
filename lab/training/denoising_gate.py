"""Last stage of the denoising model: scores of the shipped weights."""

from __future__ import annotations

import json
from typing import Any

from espalier.harness.seedling import weights_dir
from lab.training.denoising_answers import Sampler
from lab.training.greedy_scores import QuestionSet, Scores, objects_first_keep, random_keep
from lab.training.noised_batch import use_denoising_attention
from lab.training.release_stage import load_exported, missed_targets, rounded
from lab.training.seedling_model import DENOISER

WAYS = {"full": True, "prefix": False}
"""Whether a prompt sees its answer, by the name of the attention."""


def measure_denoiser(model: Any, plan: dict[str, Any], split: str) -> dict[str, Scores]:
    """Scores sampled answers in both ways of attention, and with subsets of the visual tokens.

    Args:
        model: The model, with denoising attention.
        plan: The recipe's "gate_denoising".
        split: "val" or "test".

    Returns:
        Scores by setting: "full 0.5" (steps per token), "full 0.5 random 36" and so on.
    """
    questions = QuestionSet(model, split, plan["scenes"], plan["questions"])
    few = QuestionSet(model, split, plan["subset_scenes"], plan["questions"])
    results = {}
    for way, opened in WAYS.items():
        for pace in plan["steps_per_token"]:
            sampler = Sampler(pace, opened=opened)
            results[f"{way} {pace}"] = questions.scores(model, None, sampler.decode, plan["rooms"])
        sampler = Sampler(0.5, opened=opened)
        for count in plan["keep"]:
            for name, choose in (("random", random_keep), ("objects first", objects_first_keep)):
                keep = choose(split, few.index, count)
                setting = f"{way} 0.5 {name} {count}"
                results[setting] = few.scores(model, keep, sampler.decode, plan["rooms"])
    return results


def gate_denoiser(recipe: dict[str, Any], split: str = "val") -> None:
    """Measures the shipped weights and records the scores next to them, in ``gate_denoising_SPLIT.json``.

    Args:
        recipe: The whole recipe.
        split: "val" while developing; "test" once, at the end.

    Raises:
        SystemExit: If answers with half a step per token miss a target of the recipe.
    """
    plan = recipe["gate_denoising"]
    model = load_exported(weights_dir(DENOISER))
    use_denoising_attention(model.model.language_model)
    results = measure_denoiser(model, plan, split)
    path = weights_dir(DENOISER).parent / f"gate_denoising_{split}.json"
    scores = rounded({DENOISER: results})
    path.write_text(json.dumps(scores, separators=(",", ":")) + "\n", encoding="utf-8")
    for way in WAYS:
        if missed := missed_targets(results[f"{way} 0.5"], plan["targets"]):
            raise SystemExit(f"{DENOISER}, {way} attention, misses on {split}: {', '.join(missed)}")
