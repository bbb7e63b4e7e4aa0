"""Trains the seedling models: ``python -m lab.training STAGE [--out runs/seedling]``.

Every stage resumes from its checkpoint in the run folder. "all" leaves out "subsets", a branch kept for
comparison only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lab.training.crowd_release import export_crowd, gate_crowd
from lab.training.crowd_stage import train_crowd
from lab.training.denoising_gate import gate_denoiser
from lab.training.denoising_stage import train_denoising
from lab.training.draft_stage import train_draft
from lab.training.language_stage import FORKS, train_language
from lab.training.release_stage import export, gate
from lab.training.stage_runtime import Worker, load_recipe, run_workers
from lab.training.tower_stage import train_tower
from lab.training.video_draft_stage import train_video_draft
from lab.training.video_gate import export_video, gate_video
from lab.training.video_stage import CHECKPOINT, TOP_CHECKPOINT, train_video
from lab.training.video_top_stage import train_video_top

STAGES = (
    "tower",
    "language",
    "mixtures",
    "draft",
    "export",
    "denoising",
    "export",
    "gate",
    "gate_denoising",
)
VIDEO_TRAININGS: dict[str, Callable[..., None]] = {
    "video": train_video,
    "video_top": train_video_top,
    "video_draft": train_video_draft,
}
TRAININGS: dict[str, Callable[..., None]] = {
    "tower": train_tower,
    "language": partial(train_language, branch="full"),
    **{fork: partial(train_language, branch=fork) for fork in FORKS},
    "draft": train_draft,
    "denoising": train_denoising,
    "crowd": train_crowd,
    **VIDEO_TRAININGS,
}
EXPORTS = {"export": export, "export_crowd": export_crowd, "export_video": export_video}
GATES = {
    "gate_crowd": gate_crowd,
    "gate_denoising": gate_denoiser,
    "gate_video": gate_video,
}
GOES_ON_FROM = {"video_top": (CHECKPOINT,), "video_draft": (TOP_CHECKPOINT, CHECKPOINT)}
"""Files of the run folder that a stage can start from."""
VIDEO_STAGES = (*VIDEO_TRAININGS, "export_video", "gate_video")
CROWD_STAGES = ("crowd", "export_crowd", "gate_crowd")


def run_stage(stage: str, options: argparse.Namespace) -> None:
    """Runs one stage of the recipe, by default with the recipe's number of processes."""
    recipe, out = load_recipe(continued=options.continued), options.out
    if train := TRAININGS.get(stage):
        if options.device == "cpu":
            run_workers(train, options.workers or recipe["workers"], recipe, out)
        else:
            train(Worker(0, 1, options.device, options.feeders), recipe, out)
    elif write := EXPORTS.get(stage):
        write(recipe, out, options.unfinished)
    elif stage == "gate":
        gate(recipe, out, options.split)
    else:
        GATES[stage](recipe, options.split)


def main(arguments: list[str] | None = None) -> None:
    """Runs one stage, or all of them in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "stage", choices=[*dict.fromkeys(STAGES), "subsets", *CROWD_STAGES, *VIDEO_STAGES, "all"]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/seedling"), help="run folder")
    parser.add_argument(
        "--split", default="val", choices=["val", "test"], help="split of the gates"
    )
    parser.add_argument("--workers", type=int, help="number of processes; default: the recipe's")
    parser.add_argument(
        "--device",
        default="cpu",
        choices=["cpu", "cuda"],
        help="device of the stages that train video models; cuda has one worker",
    )
    parser.add_argument(
        "--feeders", type=int, default=2, help="processes that draw clips for --device cuda"
    )
    parser.add_argument(
        "--continued",
        action="store_true",
        help="continue training the video models from the shipped weights, by the recipe's 'continued' parts",
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="also export unfinished checkpoints"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and options.stage not in VIDEO_TRAININGS:
        stages = ", ".join(VIDEO_TRAININGS)
        parser.error(f"--device cuda is of the stages {stages}, not {options.stage}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no such device here; valid: cpu")
    needed = GOES_ON_FROM.get(options.stage, ())
    if options.continued and options.stage == "video_top":
        needed = ()  # it may continue from the shipped model
    if needed and not any((options.out / name).exists() for name in needed):
        parser.error(f"{options.stage} goes on from {options.out / CHECKPOINT}: run video first")
    chosen = STAGES if options.stage == "all" else (options.stage,)
    for stage in chosen:
        run_stage(stage, options)


if __name__ == "__main__":
    main()
