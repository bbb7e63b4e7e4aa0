"""FastVID: segments, shares and merges against a literal version, and against numbers of the released code."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import Site, View
from espalier.methods.fastvid import FastVID
from espalier.methods.select.segments import segments_by_likeness
from tests.methods.cases import grid_of
from tests.methods.slow import peaks
from tests.methods.twins import check_method, outcome


def draw(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers that no release of a library changes."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape)).float()


def clip(tokens: Tensor, attention: Tensor, frames: int, width: int) -> View:
    """One video with frames of one row."""
    grid = grid_of([(frame, 0, 1, width) for frame in range(frames)])
    return View(Site("prefix"), tokens[None], grid[None], {"cls_attention": attention.view(1, -1)})


def scenes(seed: int, frames: int, width: int) -> View:
    """Three scenes of about equal length, with noise."""
    scene = draw(seed, 3, width, 6)[torch.arange(frames) * 3 // frames]
    tokens = (scene + 0.5 * draw(seed + 10, frames, width, 6)).view(frames * width, 6)
    return clip(tokens, draw(seed + 20, frames, width), frames, width)


# ---------------------------------------------------------------- a literal version


def slow_fastvid(method: FastVID, view: View, _row: int, keep: int) -> dict[int, Tensor]:
    """One video, frame by frame and token by token, for frames of one size."""
    frames, width = int(view.grid[0, -1, 0]) + 1, int(view.grid[0, -1, 3]) + 1
    tokens, attention = view.tokens[0].double(), view.signals["cls_attention"][0].tolist()
    mean = [tokens[f * width : (f + 1) * width].mean(0) for f in range(frames)]
    alike = [float(cosine_similarity(mean[f], mean[f + 1], dim=0)) for f in range(frames - 1)]
    lowest = sorted(range(frames - 1), key=lambda f: (alike[f], f))[: method.c - 1]
    cuts = sorted({*lowest, *(f for f in range(frames - 1) if alike[f] < method.tau)})
    due = [keep * (f + 1) // frames - keep * f // frames for f in range(frames)]
    values: dict[int, Tensor] = {}
    for first, last in zip([0, *(cut + 1 for cut in cuts)], [*cuts, frames - 1], strict=True):
        numbers = list(range(first, last + 1))
        total, m = sum(due[f] for f in numbers), len(numbers)
        n_anchors = math.floor(method.d * total + 1e-9)
        carriers = numbers[::-1][:: method.p]
        taken: list[int] = []
        for place, f in enumerate(numbers):
            count = (total - n_anchors) // m + (place < (total - n_anchors) % m)
            inside = range(f * width, (f + 1) * width)
            taken += sorted(inside, key=lambda t: (-attention[t], t))[:count]
        groups = []
        for place, f in enumerate(carriers):
            count = n_anchors // len(carriers) + (place < n_anchors % len(carriers))
            free = [t for t in range(f * width, (f + 1) * width) if t not in taken]
            groups.append(anchors(tokens, free, count))
        for t in taken:
            values[t] = tokens[t]
        for group in groups:
            joined: dict[int, list[int]] = {anchor: [] for anchor in group}
            for t in range(first * width, (last + 1) * width):
                if group and t not in taken and t not in group:
                    likeness = [
                        float(cosine_similarity(tokens[t], tokens[a], dim=0)) for a in group
                    ]
                    joined[group[likeness.index(max(likeness))]].append(t)
            for anchor, others in joined.items():
                weight = max(1 / (len(others) + 1), method.beta) if others else 1.0
                rest = tokens[others].mean(0) if others else 0.0
                values[anchor] = weight * tokens[anchor] + (1 - weight) * rest
    return values


def anchors(tokens: Tensor, free: list[int], count: int) -> list[int]:
    """Density peaks among some tokens."""
    squared = [[float((tokens[i] - tokens[j]).square().mean()) for j in free] for i in free]
    return [free[place] for place in peaks(squared, min(4, len(free)), count)]


test_fastvid = check_method(
    "fastvid",
    slow_fastvid,
    settings=(
        {},
        {"c": 2, "tau": -1.0, "d": 0.3, "p": 2, "beta": 0.1},
        {"c": 1, "d": 0.0},
    ),
    views=lambda _method, _keep, clip: scenes(sum(clip), clip[0], 8),
    varied=list(product((2, 5, 9), (3, 11, 18))),
    keeps=lambda n_tokens: [min(keep, n_tokens // 2) for keep in (3, 11, 18)],
    released=lambda case: scenes(case["seed"], case["frames"], case["width"]),
    sums_atol=2e-3,
)


# ---------------------------------------------------------------- by hand


def test_a_worked_example() -> None:
    """Two frames of three tokens; four stay: one by attention and, in the last frame, two anchors; or one each."""
    tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.9, 1.0]])
    view = clip(tokens, torch.tensor([0.1, 0.2, 0.7, 0.6, 0.3, 0.1]), frames=2, width=3)
    # One segment, K = 4: floor(0.5 * 4) = 2 anchors in frame 1, and one token of attention in each frame, 2 and 3.
    plan = FastVID(c=1, tau=-1.0, d=0.5, p=4, beta=0.5).plan(view, 4)
    assert plan.kept.tolist() == [[2, 3, 4, 5]]
    # Of tokens 0 and 1, 0 is closer to anchor 5 and 1 equals anchor 4: n = 1, w = max(1 / 2, 0.5).
    assert torch.allclose(outcome(view, plan)[0][2], torch.tensor([0.0, 1.0]))
    assert torch.allclose(outcome(view, plan)[0][3], (tokens[5] + tokens[0]) / 2)
    heavy = FastVID(c=1, tau=-1.0, d=0.5, p=4, beta=0.9).plan(view, 4)
    assert torch.allclose(outcome(view, heavy)[0][3], 0.9 * tokens[5] + 0.1 * tokens[0])


def test_segments_end_between_videos_and_at_the_least_similar_frames() -> None:
    sizes, place = torch.tensor([1] * 6), torch.tensor([0, 1, 2, 0, 1, 2])
    tokens = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3], [1.0, 0.3], [0.0, 1.0], [0.1, 1.0]])
    for fewest, tau, last_frames in (
        (1, -1.0, [2, 5]),
        (2, -1.0, [2, 3, 5]),
        (1, 0.99, [1, 2, 3, 5]),
        (9, 0.9, [0, 1, 2, 3, 4, 5]),
    ):
        segments = segments_by_likeness(tokens, sizes, place, fewest, tau)
        assert [last for _, last in segments] == last_frames
