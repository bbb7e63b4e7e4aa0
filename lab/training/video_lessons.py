"""Training data of the video stages: drawn in the training process or in separate ones."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from espalier.harness.seedling.video.clips import clip
from espalier.harness.seedling.video.events import MOST_FRAMES
from lab.training.attention_loss import Looks, evidence, looking_back, of_times
from lab.training.clip_features import (
    ClipTokens,
    ShownTokens,
    features_of,
    labelled,
    needed,
    show,
    taken,
)
from lab.training.dialogue_packs import Packed
from lab.training.naming_losses import LAST, labels_of
from lab.training.stage_runtime import Worker
from lab.training.video_drills import talks_about
from lab.training.video_labels import asked_for
from lab.training.video_model import FRAME_TOKENS
from lab.training.video_packs import pack_talks

ONCE = ("digits", "caption", "goes_on")
"""Families with one question per clip."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """Data of a step or a part of one: B clips, their shown tokens, and dialogues about them.

    Attributes:
        clips: Numbers of the clips in their pool ``(B,)``.
        shown_tokens: The tokens shown.
        packed: The dialogues.
        labels: Naming labels of the tokens, see :func:`labels_of`, and of the words, see :func:`asked_for`.
        looks: Attention targets of the words of answers.
        looks_back: Attention targets of tokens in which something begins; empty if not in the recipe.
        times: The part of `looks` for the kinds of times in the recipe's "time_heads".
    """

    clips: list[int]
    shown_tokens: ShownTokens
    packed: Packed
    labels: dict[str, torch.Tensor]
    looks: Looks
    looks_back: dict[str, Looks]
    times: dict[str, Looks]

    def on_device_of(self, pool: torch.Tensor) -> Lesson:
        """Returns the lesson on the device of the tower's features of all clips ``(P, N, 4, 128)``, with its own."""
        device = pool.device
        return Lesson(
            self.clips,
            replace(self.shown_tokens, features=taken(pool[self.clips], self.shown_tokens.chosen)),
            self.packed.to(device),
            {name: tensor.to(device) for name, tensor in self.labels.items()},
            self.looks.to(device),
            {name: look.to(device) for name, look in self.looks_back.items()},
            {name: look.to(device) for name, look in self.times.items()},
        )


@dataclass(frozen=True)
class Feed:
    """Lessons for one worker, one per part of a step; blocks share a pool of clips, each shown several times.

    Drawing a clip and running the tower on it costs about as much as a step on it; dialogues and
    tokens shown differ at each visit. The content of a lesson depends only on its number.

    Attributes:
        worker: The process.
        plan: The recipe's "video".
        seed: The recipe's seed.
    """

    worker: Worker
    plan: dict[str, Any]
    seed: int

    @property
    def count(self) -> int:
        """Number of lessons."""
        total: int = self.plan["steps"] * self.plan["parts"]
        return total

    def phase(self, lesson: int) -> dict[str, Any]:
        """Returns the part of the curriculum that a lesson belongs to."""
        phases: list[dict[str, Any]] = self.plan["phases"]
        step = lesson // self.plan["parts"]
        return next(phase for phase in phases if step < phase["until"])

    def block(self, number: int) -> tuple[torch.Tensor, list[Lesson]]:
        """Returns the frames of a block's clips ``(P, T, 96, 96, 3)``, uint8, and its lessons."""
        plan, block = self.plan, self.plan["block"]
        phase = self.phase(number * block)
        frames = int(np.random.default_rng([self.seed, 77, number]).choice(phase["frames"]))
        # A similar number of visual tokens in every lesson, for any clip length.
        count = max(phase["clips"] * min(phase["frames"]) // frames, 1)
        size = block * count // plan["visits"]
        first = plan["first_index"] + (number * self.worker.count + self.worker.rank) * 4096
        pool = [labelled(clip("train", self.seed, first + place, frames)) for place in range(size)]
        lessons = [self._lesson(number * block + place, pool, count) for place in range(block)]
        return torch.from_numpy(np.stack([drawn.clip.frames for drawn in pool])), lessons

    def _lesson(self, lesson: int, pool: list[ClipTokens], count: int) -> Lesson:
        """Returns a lesson, by its number, on `count` clips of its block's."""
        plan, size = self.plan, len(pool)
        number, place = divmod(lesson, plan["block"])
        phase, frames = self.phase(number * plan["block"]), len(pool[0].clip.frames)
        visit, start = place * count // size, place * count % size
        order = np.random.default_rng([self.seed, 78, number, visit]).permutation(size)
        clips = [int(order[(start + offset) % size]) for offset in range(count)]
        chosen = [pool[number] for number in clips]
        draw = np.random.default_rng([self.seed, 79, lesson, self.worker.rank])
        total = FRAME_TOKENS * frames
        low, high = phase["keep"]
        # All workers show all tokens in the same step, because it takes several times as long.
        complete = np.random.default_rng([self.seed, 80, lesson]).random() < phase["whole"]
        keep = total if complete else int(total * draw.uniform(low, high))
        first_frame = 0
        if draw.random() < plan["later"]:
            first_frame = int(draw.integers(MOST_FRAMES - frames + 1))
        mix = plan["mixes"][lesson % len(plan["mixes"])]
        factor = plan["more"] if frames >= plan["long"] else 1
        counts = {family: n if family in ONCE else factor * n for family, n in mix.items()}
        talks = [
            talks_about(drawn.clip, visit, counts, factor * plan["drills"]) for drawn in chosen
        ]
        needs = []
        if plan["needed"] and draw.random() < plan["needed"]:
            for drawn, items in zip(chosen, talks, strict=True):
                needs.append(needed(drawn, [item for talk in items for item in talk.shows]))
        shown_tokens = show(chosen, keep, plan["tilt"], draw, first_frame, needs)
        packed = pack_talks(talks, plan["weights"], shown_tokens)
        looks = evidence(talks, packed, chosen, shown_tokens)
        return Lesson(
            clips,
            shown_tokens,
            packed,
            labels_of(chosen, shown_tokens) | asked_for(talks, packed),
            looks,
            {
                name: looking_back(chosen, shown_tokens, name)
                for name in LAST
                if plan["looking_back"]
            },
            {
                name: of_times(looks, talks, packed, kind["families"])
                for name, kind in plan["time_heads"].items()
            },
        )

    def lessons(self, tower: Any, first_step: int) -> Iterator[tuple[Lesson, torch.Tensor]]:
        """Yields the lessons from a step on, with the features of all tokens of their clips ``(B, N, 4, 128)``.

        They are on the tower's device. Feeders of the worker draw blocks in advance, one at a time each.
        """
        block, first = self.plan["block"], first_step * self.plan["parts"]
        numbers = range(first // block, -(-self.count // block))
        for number, (frames, lessons) in zip(numbers, self._blocks(numbers), strict=True):
            pool = features_of(tower, frames.flatten(0, 1))
            pool = pool.unflatten(0, (len(frames), -1))
            for place, lesson in enumerate(lessons, start=number * block):
                if first <= place < self.count:
                    yield lesson.on_device_of(pool), pool[lesson.clips]

    def _blocks(self, numbers: range) -> Iterable[tuple[torch.Tensor, list[Lesson]]]:
        if not self.worker.feeders:
            return map(self.block, numbers)
        loader = DataLoader(
            _Blocks(self),
            batch_size=None,
            sampler=numbers,
            num_workers=self.worker.feeders,
            prefetch_factor=1,
        )
        return ((frames, pickle.loads(lessons)) for frames, lessons in loader)


@dataclass(frozen=True)
class _Blocks(Dataset[tuple[torch.Tensor, bytes]]):
    """Blocks by number, serialised for transfer between processes."""

    feed: Feed

    def __getitem__(self, number: int) -> tuple[torch.Tensor, bytes]:
        frames, lessons = self.feed.block(number)
        # Each tensor passed separately keeps a file open, and there are hundreds of small ones.
        return frames, pickle.dumps(lessons)
