"""Trains the video model: projector and text stack on clips, with the tower frozen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.seedling.model import weights_dir
from harness.seedling.training.fast_math import use_attention, use_bf16_products
from harness.seedling.training.language import answer_loss
from harness.seedling.training.packing import IGNORE, Packed
from harness.seedling.training.release import load_exported
from harness.seedling.training.runtime import (
    TrainingLog,
    Worker,
    cosine_lr,
    load_checkpoint,
    make_optimiser,
    save_checkpoint,
    set_lr,
)
from harness.seedling.training.tower_stage import tower_of
from harness.seedling.training.video import Seen, Shown, needed, see, show, visual_tokens
from harness.seedling.training.video_drills import Talk, talks_about
from harness.seedling.training.video_gaze import looking_back_loss, looking_loss
from harness.seedling.training.video_namers import Namers
from harness.seedling.training.video_packing import (
    ATTENTION,
    pack_talks,
    video_attention,
    video_hidden,
)
from harness.seedling.training.video_start import start_from_seedling
from harness.seedling.video.vocabulary import MOST_FRAMES
from harness.seedling.video_model import FRAME_TOKENS, build_video_model, video_weights_dir

CHECKPOINT = "video.pt"
ONCE = ("digits", "caption", "goes_on")
"""Families with one question to a clip."""


@dataclass
class Feed:
    """Clips for one worker: blocks of steps share a pool of clips, each shown several times.

    Drawing a clip and running the tower over it costs about as much as a step on it; dialogues and
    tokens shown are other ones at each visit. What a step gets depends on its number alone.

    Attributes:
        worker: The process.
        plan: The recipe's "video".
        seed: The recipe's seed.
        tower: The frozen tower.
    """

    worker: Worker
    plan: dict[str, Any]
    seed: int
    tower: Any
    _block: int = -1
    _pool: list[Seen] = field(default_factory=list)

    def phase(self, step: int) -> dict[str, Any]:
        """Returns the part of the curriculum that a step belongs to."""
        phases: list[dict[str, Any]] = self.plan["phases"]
        return next(phase for phase in phases if step < phase["until"])

    def batch(self, step: int) -> tuple[list[Seen], Shown, list[list[Talk]]]:
        """Returns the clips of a step, the tokens shown and the dialogues."""
        plan = self.plan
        steps, visits = plan["block"], plan["visits"]
        block, place = divmod(step, steps)
        phase = self.phase(block * steps)
        rng = np.random.default_rng([self.seed, 77, block])
        frames = int(rng.choice(phase["frames"]))
        # About as many visual tokens in every step, however long the clips.
        count = max(phase["clips"] * min(phase["frames"]) // frames, 1)
        size = steps * count // visits
        if block != self._block:
            first = plan["first_index"] + (block * self.worker.count + self.worker.rank) * 4096
            self._pool = [
                see(self.tower, "train", self.seed, first + number, frames)
                for number in range(size)
            ]
            self._block = block
        visit = place * count // size
        order = np.random.default_rng([self.seed, 78, block, visit]).permutation(size)
        start = place * count % size
        chosen = [self._pool[order[(start + number) % size]] for number in range(count)]
        draw = np.random.default_rng([self.seed, 79, step, self.worker.rank])
        total = FRAME_TOKENS * frames
        low, high = phase["keep"]
        keep = total if draw.random() < phase["whole"] else int(total * draw.uniform(low, high))
        first_frame = 0
        if draw.random() < plan["later"]:
            first_frame = int(draw.integers(MOST_FRAMES - frames + 1))
        mix = plan["mixes"][step % len(plan["mixes"])]
        more = plan["more"] if frames >= plan["long"] else 1
        counts = {family: n if family in ONCE else more * n for family, n in mix.items()}
        talks = [talks_about(one.clip, visit, counts, more * plan["drills"]) for one in chosen]
        needs = []
        if plan["needed"] and draw.random() < plan["needed"]:
            for one, items in zip(chosen, talks, strict=True):
                needs.append(needed(one, [what for talk in items for what in talk.shows]))
        shown = show(chosen, keep, plan["tilt"], draw, first_frame, needs)
        return chosen, shown, talks


def new_model(start: str = "seedling") -> Any:
    """Returns the video model as training starts, with packed attention.

    Args:
        start: "seedling", or the shipped video model to go on with, of which only the weights are left.
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


def train_video(worker: Worker, recipe: dict[str, Any], out: Path) -> None:
    """Trains the video model; resumes from ``out/video.pt``.

    Args:
        worker: This process.
        recipe: The whole recipe.
        out: Run folder.
    """
    plan, seed = recipe["video"], recipe["seed"]
    torch.manual_seed(seed)
    model, namers = new_model(plan["start"]), Namers()
    feed = Feed(worker, plan, seed, tower_of(model))
    use_bf16_products(model.model.multi_modal_projector)
    use_bf16_products(model.model.language_model)
    parameters = [*(p for p in model.parameters() if p.requires_grad), *namers.parameters()]
    optimiser = make_optimiser(parameters, plan["lr"], plan["betas"], plan["weight_decay"])
    log = TrainingLog(out / "log.jsonl", stage_of("video", plan))
    first_step = 0
    if checkpoint := load_checkpoint(out / CHECKPOINT):
        model.load_state_dict(checkpoint["model"])
        namers.load_state_dict(checkpoint["namers"])
        optimiser.load_state_dict(checkpoint["optimiser"])
        first_step = checkpoint["step"]
    sums: dict[str, float] = {}
    began = time.monotonic()
    for step in range(first_step, plan["steps"]):
        set_lr(optimiser, restarted_lr(step, plan))
        seen, shown, talks = feed.batch(step)
        packed = pack_talks(talks, plan["weights"], shown)
        visual = visual_tokens(model, shown.features)
        read = video_hidden(model, visual, shown, packed)
        answered = packed.labels != IGNORE
        logits = model.lm_head(read.words[answered])
        terms = namers.losses(model, read, plan["named_after"], seen, shown)
        terms["gaze"] = looking_loss(model, read, plan["gaze"], talks, packed, seen, shown)
        if plan["looking_back"]:
            terms["back"] = looking_back_loss(model, read, plan["looking_back"], seen, shown)
        terms["answers"] = answer_loss(logits, packed.labels[answered], packed.weights[answered])
        loss = torch.stack([plan["terms"][name] * term for name, term in terms.items()]).sum()
        optimiser.zero_grad()
        loss.backward()
        worker.average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()

        done = step + 1
        if not worker.leads:
            continue
        for name, term in terms.items():
            sums[name] = sums.get(name, 0.0) + term.item() / plan["log_every"]
        if done % plan["log_every"] == 0:
            rate = plan["log_every"] / (time.monotonic() - began)
            tokens = shown.chosen.size + packed.tokens.numel()
            log.write(step=done, frames=shown.frames, tokens=tokens, rate=rate, **sums)
            sums, began = {}, time.monotonic()
        if done % plan["save_every"] == 0 or done == plan["steps"]:
            state = {"model": model.state_dict(), "namers": namers.state_dict(), "step": done}
            save_checkpoint(out / CHECKPOINT, {**state, "optimiser": optimiser.state_dict()})
        if done % plan["validate_every"] == 0 or done == plan["steps"]:
            log.write(step=done, val=validate_video(model, plan["validation"]))
            began = time.monotonic()


def stage_of(name: str, plan: dict[str, Any]) -> str:
    """Returns what the log calls a stage: one that goes on from a shipped model follows the one that made it."""
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

    Every word is predicted behind the right answer so far. All being right is the same event as greedy
    decoding giving the right answer, at the cost of one forward pass; of captions and digits, which
    are long, "family/words" is the share of right words.

    Args:
        model: The model.
        plan: "clips" by number of frames, and "questions" of each family.
        keep: Share of the visual tokens that is shown, objects first in part.
    """
    rng = np.random.default_rng(0)
    totals: dict[str, list[float]] = {}
    for frames, clips in plan["clips"].items():
        for index in range(clips):
            seen = [see(tower_of(model), "val", 0, index, frames)]
            shown = show(seen, round(keep * FRAME_TOKENS * frames), 0.5, rng)
            talks = [talks_about(seen[0].clip, 0, plan["questions"], plan["drills"])]
            for family, right in exact_talks(model, shown, talks):
                totals.setdefault(f"{frames}/{family}", []).append(right)
    return {name: sum(values) / len(values) for name, values in sorted(totals.items())}


@torch.no_grad()
def exact_talks(
    model: Any, shown: Shown, talks: Sequence[Sequence[Talk]]
) -> list[tuple[str, float]]:
    """Returns (family, 1 or 0) of each answer, and (family/words, share) of long ones."""
    weights = dict.fromkeys([*(t.family for items in talks for t in items), "end"], 1.0)
    packed = pack_talks(talks, weights, shown)
    read = video_hidden(model, visual_tokens(model, shown.features), shown, packed)
    predicted = model.lm_head(read.words).argmax(-1)
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
    found = [(family, float(right.all()))]
    if family in ("caption", "digits"):
        found.append((f"{family}/words", float(right.mean())))
    return found
