"""VidCom2 against a slow version, by hand, on models, and against what the released codes keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from espalier.methods.base import View
from espalier.methods.vidcom2 import VidCom2
from tests.methods.cases import PREFIX, VIDEOS, grid_of
from tests.methods.released import case_video, numbers, released_video
from tests.methods.twins import check_kept, check_method


def slow_vidcom2(method: VidCom2, view: View, row: int, keep: int) -> list[int]:
    """Frame by frame and token by token, by the equations; videos end where the size of frames changes."""
    videos: list[list[list[int]]] = []
    last = None
    for token, (frame, *_) in enumerate(view.grid[row].tolist()):
        if frame != last:
            size = int((view.grid[row, :, 0] == frame).sum())
            if not videos or len(videos[-1][0]) != size:
                videos.append([])
            videos[-1].append([])
        videos[-1][-1].append(token)
        last = frame
    total, done, kept = view.tokens.shape[1], 0, list[int]()
    for video in videos:
        upto = done + sum(map(len, video))
        share = keep * upto // total - keep * done // total
        kept, done = kept + slow_of_video(method, view.tokens[row].double(), video, share), upto
    return sorted(kept)


def slow_of_video(method: VidCom2, tokens: Tensor, video: list[list[int]], keep: int) -> list[int]:
    every = [token for frame in video for token in frame]
    columns = range(tokens.shape[1])
    variance = [float(tokens[every, column].var(unbiased=False)) for column in columns]
    steady = sorted(columns, key=lambda column: (variance[column], column))
    steady = steady[: max(1, int(len(columns) * method.channels))]
    units = {i: tokens[i, steady] / tokens[i, steady].norm() for i in every}
    centre = sum(units.values()) / len(every)
    video_score = {i: gauss(units[i] - centre) for i in every}
    scores = {}
    for frame in video:
        middle = sum(units[i] for i in frame) / len(frame)
        scores |= {i: video_score[i] + gauss(units[i] - middle) for i in frame}
    unlike = [-sum(video_score[i] for i in frame) / len(frame) for frame in video]
    weights = [math.exp((u - max(unlike)) / method.temperature) for u in unlike]
    chosen: list[int] = []
    for frame, weight in zip(video, weights, strict=True):
        share = keep / len(every) * (1 + weight / sum(weights) - 1 / len(video))
        count = max(1, round(min(1.0, share) * len(frame)))
        chosen += sorted(frame, key=lambda i: scores[i])[:count]
    dropped = sorted((i for i in every if i not in chosen), key=lambda i: scores[i])
    chosen.sort(key=lambda i: scores[i])
    return (chosen + dropped)[:keep]


def gauss(gap: Tensor) -> float:
    squared = float(gap.square().sum())
    return sum(math.exp(-squared / (2 * 2.0**power)) for power in range(-3, 2))


test_vidcom2 = check_method(
    "vidcom2",
    slow_vidcom2,
    settings=({}, {"channels": 1.0, "temperature": 0.5}),
    views=lambda _method, _keep: View(
        PREFIX, numbers(5, 3, 48, 7), torch.stack([grid_of(tiling) for tiling in VIDEOS])
    ),
    keeps=(1, 5, 20, 47, 48),
    released=lambda case: case_video(case, PREFIX),
    sources=("vidcom2", "vidcom2_vllm"),
)


def test_three_frames_by_hand() -> None:
    """One of two channels: tokens are 1 or -1, and the video's mean 1/3. Frame 1 is farthest from it.

    p is 1 for it, so that with r = 1/2 (keep 3) frames are due 2 (1/2 2/3), 2 (1/2 5/3), 2 (1/2 2/3), so 1, 2, 1.
    """
    tokens = torch.tensor([[[3.0, 9], [5, -9]], [[-2, 9], [-2, -9]], [[1, 9], [4, -9]]])
    view = released_video(PREFIX, tokens, 2)
    video, frame = VidCom2().likeness(tokens)
    alone = [
        sum(math.exp(-s / 2 / a) for a in (1 / 8, 1 / 4, 1 / 2, 1, 2)) for s in (4 / 9, 16 / 9)
    ]
    assert video[:, 0].tolist() == pytest.approx([alone[0], alone[1], alone[0]])
    assert frame.flatten().tolist() == pytest.approx([5.0] * 6)
    # All of a frame are equally alike, so that the first stay; one too many, and of the likest the last goes.
    check_kept(
        view,
        (VidCom2(), 4, [0, 2, 3, 4]),
        (VidCom2(), 3, [0, 2, 3]),
        (VidCom2(), 5, [0, 1, 2, 3, 4]),
    )
