"""Trains the video model: projector and text stack on clips, with the tower frozen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espalier.harness.seedling import weights_dir
from lab.training.attention_loss import looking_back_loss, looking_loss, time_heads_loss
from lab.training.clip_features import ShownTokens, see, show, visual_tokens
from lab.training.dialogue_packs import IGNORE, Packed
from lab.training.fast_math import use_attention, use_fast_products
from lab.training.language_losses import answer_loss
from lab.training.naming_losses import Namers
from lab.training.release_stage import load_exported
from lab.training.stage_runtime import (
    TrainingLog,
    Worker,
    cosine_lr,
    load_checkpoint,
    make_optimiser,
    make_optimisers,
    save_checkpoint,
    set_lr,
)
from lab.training.tower_stage import tower_of
from lab.training.video_drills import Talk, talks_about
from lab.training.video_lessons import Feed, Lesson
from lab.training.video_model import FRAME_TOKENS, build_video_model, video_weights_dir
from lab.training.video_packs import ATTENTION, pack_talks, video_attention, video_hidden
from lab.training.video_start import start_from_seedling

CHECKPOINT, TOP_CHECKPOINT = "video.pt", "video_top.pt"


def new_model(start: str = "seedling") -> Any:
    """Returns the video model for the start of training, with packed attention.

    Args:
        start: "seedling", or the shipped video model to continue from (weights only).
    """
    if start != "seedling":
        return prepared(load_exported(video_weights_dir(start)))
    model: Any = build_video_model()
    start_from_seedling(model, load_exported(weights_dir("seedling")))
    return prepared(model)


def prepared(model: Any) -> Any:
    """Freezes a model's tower and switches its text stack to packed attention."""
    tower_of(model).requires_grad_(False)
    use_attention(model.model.language_model, ATTENTION, video_attention)
    return model


def video_target(out: Path, checkpoints: Sequence[str] = (TOP_CHECKPOINT, CHECKPOINT)) -> Any:
    """Loads the trained video model, frozen.

    Args:
        out: Run folder.
        checkpoints: File names; the first that exists is loaded.

    Raises:
        FileNotFoundError: It has not been trained.
    """
    trained = next(filter(None, (load_checkpoint(out / name) for name in checkpoints)), None)
    if trained is None:
        raise FileNotFoundError(f"{out / CHECKPOINT}: run the video stage first")
    target = build_video_model()
    target.load_state_dict(trained["model"])
    return prepared(target).requires_grad_(False).eval()


def train_video(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains the video model; resumes from ``out/video.pt``.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder.
    """
    plan, seed = recipe["video"], recipe["seed"]
    torch.manual_seed(seed)
    train_stage(worker, new_model(plan["start"]), plan, seed, out, "video")


def train_stage(
    worker: Worker, model: Any, plan: dict[str, Any], seed: int, out: Path, stage: str
) -> None:
    """Trains the trainable parameters of the video model; resumes from ``out/STAGE.pt``.

    If the recipe keeps a share of the initial weights ("kept"), the result is the weighted mean with those of the last
    step; docs/log/training.md has the effect.

    Args:
        worker: This process.
        model: The model at the start of the stage.
        plan: The recipe's part for it.
        seed: The recipe's seed.
        out: Run folder.
        stage: Name of the stage in the recipe.
    """
    namers = Namers()
    use_fast_products(model.model.multi_modal_projector, worker.device)
    use_fast_products(model.model.language_model, worker.device)
    model.to(worker.device)
    namers.to(worker.device)
    learned = [p for p in model.parameters() if p.requires_grad]
    at_start = [p.detach().clone() for p in learned]
    parameters = [*learned, *(namers.parameters() if plan["named_after"] else [])]
    optimisers = make_optimisers(learned, matrices_of(model) if plan["muon"] else [], plan)
    # Naming heads are not shipped: they are reinitialised and learn while the model's rate is still low.
    optimisers.append(
        make_optimiser(namers.parameters(), plan["lr"], plan["betas"], plan["weight_decay"])
    )
    log = TrainingLog(out / "log.jsonl", stage_of(stage, plan))
    first_step = 0
    if checkpoint := load_checkpoint(out / f"{stage}.pt"):
        model.load_state_dict(checkpoint["model"])
        namers.load_state_dict(checkpoint["namers"])
        at_start = [value.to(worker.device) for value in checkpoint["at_start"]]
        for optimiser, state in zip(optimisers, checkpoint["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        first_step = checkpoint["step"]
    sums: dict[str, torch.Tensor] = {}
    tokens = 0
    began = time.monotonic()
    lessons = Feed(worker, plan, seed).lessons(tower_of(model), first_step)
    for step in range(first_step, plan["steps"]):
        for optimiser in optimisers:
            set_lr(optimiser, restarted_lr(step, plan))
            optimiser.zero_grad()
        set_lr(optimisers[-1], cosine_lr(step, plan["steps"], 1, plan["lr"]))
        for lesson, _ in islice(lessons, plan["parts"]):
            learn(losses_of(model, namers, plan, lesson), plan, sums)
            tokens += lesson.shown_tokens.chosen.size + lesson.packed.tokens.numel()
        worker.average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser in optimisers:
            optimiser.step()

        done = step + 1
        if done == plan["steps"]:
            for parameter, before in zip(learned, at_start, strict=True):
                parameter.data.lerp_(before, plan["kept"])
        if not worker.leads:
            continue
        if done % plan["log_every"] == 0:
            means = {name: total.item() / plan["log_every"] for name, total in sums.items()}
            rate = plan["log_every"] / (time.monotonic() - began)
            log.write(step=done, tokens=tokens // plan["log_every"], rate=rate, **means)
            sums, tokens, began = {}, 0, time.monotonic()
        if done % plan["save_every"] == 0 or done == plan["steps"]:
            state = {"model": model.state_dict(), "namers": namers.state_dict(), "step": done}
            states = [optimiser.state_dict() for optimiser in optimisers]
            # A stage may fit heads before its first step, so its start cannot be recomputed from the recipe.
            state |= {"optimisers": states, "at_start": at_start}
            save_checkpoint(out / f"{stage}.pt", state)
        if done % plan["validate_every"] == 0 or done == plan["steps"]:
            log.write(step=done, val=validate_video(model, plan["validation"]))
            began = time.monotonic()


def losses_of(
    model: Any, namers: Namers, plan: dict[str, Any], lesson: Lesson
) -> dict[str, torch.Tensor]:
    """Returns the loss terms of a lesson, by their names in the recipe's "terms"."""
    shown_tokens, packed = lesson.shown_tokens, lesson.packed
    read = video_hidden(model, visual_tokens(model, shown_tokens), shown_tokens, packed)
    answered = packed.labels != IGNORE
    logits = model.lm_head(read.words[answered])
    named = plan["named_after"]
    terms = namers.losses(model, read, named, lesson.labels) if named else {}
    terms["gaze"] = looking_loss(model, read, plan["gaze"], lesson.looks)
    if plan["looking_back"]:
        terms["back"] = looking_back_loss(model, read, plan["looking_back"], lesson.looks_back)
    if plan["time_heads"]:
        terms["times"] = time_heads_loss(model, read, plan["time_heads"], lesson.times)
    terms["answers"] = answer_loss(logits, packed.labels[answered], packed.weights[answered])
    return terms


def learn(
    terms: dict[str, torch.Tensor], plan: dict[str, Any], sums: dict[str, torch.Tensor]
) -> None:
    """Adds a lesson's part of a step: gradients to the parameters', loss terms to their sums."""
    share = {name: term / plan["parts"] for name, term in terms.items()}
    torch.stack([plan["terms"][name] * term for name, term in share.items()]).sum().backward()
    for name, term in share.items():
        sums[name] = sums.get(name, 0.0) + term.detach()


def matrices_of(model: Any) -> list[torch.nn.Parameter]:
    """Returns the matrices that learn inside the text stack's layers."""
    layers = model.model.language_model.layers
    return [p for p in layers.parameters() if p.ndim == 2 and p.requires_grad]


def stage_of(name: str, plan: dict[str, Any]) -> str:
    """Returns a stage's name in the log; a stage that continues a shipped model follows the original one."""
    return f"{name}_continued" if str(plan["start"]).startswith("seedling_") else name


def restarted_lr(step: int, plan: dict[str, Any]) -> float:
    """Returns the learning rate of a step: a cosine from the start, and another from each of the "restarts" on."""
    peaks = [{"at": 0, "lr": plan["lr"]}, *plan.get("restarts", [])]
    number = max(place for place, peak in enumerate(peaks) if peak["at"] <= step)
    start, end = peaks[number]["at"], [*peaks, {"at": plan["steps"]}][number + 1]["at"]
    return cosine_lr(step - start, end - start, plan["warmup"], peaks[number]["lr"])


@torch.no_grad()
def validate_video(model: Any, plan: dict[str, Any], keep: float = 1.0) -> dict[str, float]:
    """Returns the share of exactly right answers per family, "T frames/family", on validation clips.

    Every word is predicted after the correct answer so far. All being right is the same event as a correct
    greedy answer, at the cost of one forward pass; for captions and digits, which
    are long, "family/words" is the share of right words.

    Args:
        model: The model.
        plan: "clips" by number of frames, and "questions" of each family.
        keep: Share of visual tokens shown, with a preference for objects.
    """
    rng = np.random.default_rng(0)
    totals: dict[str, list[float]] = {}
    for frames, count in plan["clips"].items():
        for index in range(count):
            clips = [see(tower_of(model), "val", 0, index, frames)]
            shown_tokens = show(clips, round(keep * FRAME_TOKENS * frames), 0.5, rng)
            talks = [talks_about(clips[0].clip, 0, plan["questions"], plan["drills"])]
            for family, right in exact_talks(model, shown_tokens, talks):
                totals.setdefault(f"{frames}/{family}", []).append(right)
    return {name: sum(values) / len(values) for name, values in sorted(totals.items())}


@torch.no_grad()
def exact_talks(
    model: Any, shown_tokens: ShownTokens, talks: Sequence[Sequence[Talk]]
) -> list[tuple[str, float]]:
    """Returns (family, 1 or 0) of each answer, and (family/words, share) of long ones."""
    weights = dict.fromkeys([*(t.family for items in talks for t in items), "end"], 1.0)
    packed = pack_talks(talks, weights, shown_tokens)
    moved = packed.to(model.device)
    read = video_hidden(model, visual_tokens(model, shown_tokens), shown_tokens, moved)
    predicted = model.lm_head(read.words).argmax(-1).cpu()
    return [
        result
        for row, items in enumerate(talks)
        for number, talk in enumerate(items)
        for result in _scored(packed, predicted, row, number, talk.family)
    ]


def _scored(
    packed: Packed, predicted: torch.Tensor, row: int, number: int, family: str
) -> list[tuple[str, float]]:
    mine = (packed.segments[row] == number) & (packed.labels[row] != IGNORE)
    right = (predicted[row] == packed.labels[row])[mine].float()
    scores = [(family, float(right.all()))]
    if family in ("caption", "digits"):
        scores.append((f"{family}/words", float(right.mean())))
    return scores
