"""STTM against a slow version, by hand, on models, and against what its released code merges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import Site, View
from espalier.methods.sttm import STTM
from tests.families import FAMILIES
from tests.family_runs import adapter_of
from tests.methods.cases import grid_of
from tests.methods.released import case_video, numbers, released_video, scenes
from tests.methods.runs import kept_by
from tests.methods.twins import check_method, outcome

SITE = Site("layer", 2)


@dataclass
class Cell:
    """A cell of the slow version: its parts, its mean, and the tokens (row, column) it covers."""

    parts: list[Cell]
    mean: Tensor
    places: list[tuple[int, int]]
    likeness: float = 1.0


def alike(first: Tensor, second: Tensor) -> float:
    return float(cosine_similarity(first, second, dim=0))


def halves(count: int) -> list[list[int]]:
    """Pairs of neighbours; the first stands alone if the count is odd."""
    odd = count % 2
    return [[0]] * odd + [[n, n + 1] for n in range(odd, count, 2)]


def slow_levels(frame: Tensor) -> list[list[list[Cell]]]:
    """The levels of a frame (h, w, D), the finest first: rows of cells."""
    rows, columns = frame.shape[:2]
    levels = [[[Cell([], frame[r, c], [(r, c)]) for c in range(columns)] for r in range(rows)]]
    while min(len(levels[-1]), len(levels[-1][0])) > 2:
        fine = levels[-1]
        coarse: list[list[Cell]] = []
        for pair in halves(len(fine)):
            coarse.append([])
            for across in halves(len(fine[0])):
                parts = [fine[r][c] for r, c in product(pair, across)]
                mean = torch.stack([part.mean for part in parts]).mean(dim=0)
                compared = [*parts, *([fine[0][0]] if len(parts) < 4 else [])]
                lowest = min(alike(mean, part.mean) for part in compared)
                places = sorted(place for part in parts for place in part.places)
                coarse[-1].append(Cell(parts, mean, places, 1.0 if len(parts) == 1 else lowest))
        levels.append(coarse)
    return levels


def slow_cells(video: Tensor, method: STTM, fewest: int) -> list[list[Cell]]:
    """The cells of each frame, splitting the least alike one after the other."""
    leaves = []  # likeness or that of a larger cell, level from the coarsest, frame, cell
    for number, frame in enumerate(video):
        levels = slow_levels(frame)
        start = max(0, len(levels) - 1 - method.root)
        leaves += [(c.likeness, -start, number, c) for row in levels[start] for c in row]
    while True:
        open_leaves = [leaf for leaf in leaves if leaf[3].parts]
        if not open_leaves:
            break
        leaf = min(open_leaves, key=lambda leaf: (*leaf[:3], leaf[3].places[0]))
        if leaf[0] >= method.tau_space and len(leaves) >= fewest:
            break
        leaves.remove(leaf)
        leaves += [(max(leaf[0], c.likeness), leaf[1] + 1, leaf[2], c) for c in leaf[3].parts]
    frames = [[leaf[3] for leaf in leaves if leaf[2] == n] for n in range(len(video))]
    return [sorted(frame, key=lambda cell: cell.places[0]) for frame in frames]


def slow_sttm(method: STTM, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """One video, cell by cell: what stands at each kept token."""
    size = (view.grid[row][:, [0, 2, 3]].amax(dim=0) + 1).tolist()
    video = view.tokens[row].double().unflatten(0, size)
    frames = slow_cells(video, method, 1 if method.adaptive else keep)
    cells = [cell for frame in frames for cell in frame]
    number = {id(cell): n for n, cell in enumerate(cells)}
    overlaps = [
        (number[id(a)], number[id(b)])
        for earlier, later in pairwise(frames)
        for a, b in product(earlier, later)
        if set(a.places) & set(b.places)
    ]
    likeness = {(a, b): alike(cells[a].mean, cells[b].mean) for a, b in overlaps}
    if method.adaptive:
        label = passed_on([p for p in overlaps if likeness[p] >= method.tau_time], len(cells))
    else:
        for n in range(1, len(frames[0])):
            likeness[n - 1, n] = alike(cells[n - 1].mean, cells[n].mean) - 4
        best: dict[int, tuple[int, int]] = {}
        for pair in sorted(likeness):
            if pair[1] not in best or likeness[pair] > likeness[best[pair[1]]]:
                best[pair[1]] = pair
        likest = sorted(best.values(), key=lambda pair: -likeness[pair])
        label = list(range(len(cells)))
        for earlier, later in sorted(likest[: len(cells) - keep]):
            label[later] = label[earlier]
    height, width = video.shape[1:3]
    at: dict[int, int] = {}
    for n, cell in enumerate(cells):
        frame = next(t for t, frame in enumerate(frames) if any(cell is c for c in frame))
        row, column = cell.places[0]
        at[n] = frame * height * width + row * width + column
    groups = {lead: [n for n in at if label[n] == lead] for lead in sorted(set(label))}
    return {
        at[lead]: torch.stack([cells[n].mean for n in group]).mean(dim=0)
        for lead, group in groups.items()
    }


def passed_on(pairs: Iterable[tuple[int, int]], count: int) -> list[int]:
    """Labels in passes over all pairs, as the released code passes them on."""
    label = list(range(count))
    while True:
        new = list(label)
        for pair in pairs:
            for point in pair:
                new[point] = min(new[point], *(label[other] for other in pair))
        label = [new[point] for point in new]
        if label == [label[point] for point in label]:
            return label


def test_two_frames_by_hand() -> None:
    """Frames of 4 x 4: a quarter of equal tokens, one with cosines of 0.95 to its mean (3, 0, 0), two of unlike ones.

    From frame to frame the first quarter turns, to a cosine of 0.8, and all else stays.
    """
    video = numbers(7, 4, 4, 3).repeat(2, 1, 1, 1)
    video[0, :2, :2] = torch.tensor([1.0, 0, 0])
    video[1, :2, :2] = torch.tensor([4.0, 3, 0])
    video[:, 0, 2:] = torch.tensor([3.0, 1, 0])
    video[:, 1, 2:] = torch.tensor([3.0, -1, 0])
    view = released_video(SITE, video.flatten(1, 2), 4)
    lower = list(range(8, 16))
    for time, turned in ((0.79, []), (0.81, [16])):
        method = STTM(tau_space=0.94, tau_time=time, root=0)
        assert method.adaptive
        plan = method.plan(view, 9)
        assert plan.kept[0].tolist() == [0, 2, *lower, *turned]
        first = torch.tensor([1.0, 0, 0] if turned else [2.5, 1.5, 0])
        torch.testing.assert_close(
            outcome(view, plan)[0][:2], torch.stack([first, torch.tensor([3.0, 0, 0])])
        )
    # Solved: all but the likest pairs stay, and the turned quarter goes last of those that overlap.
    solved = STTM(tau_space=0.94, root=0)
    assert not solved.adaptive
    assert solved.plan(view, 11).kept[0].tolist() == [0, 2, *lower, 16]
    assert solved.plan(view, 10).kept[0].tolist() == [0, 2, *lower]
    # 0.95 < 0.96: the second quarter splits. So does the first cell, if so many must stay.
    assert STTM(tau_space=0.96, root=0).plan(view, 13).kept[0].tolist() == [0, 2, 3, 6, 7, *lower]
    assert solved.plan(view, 32).kept[0].tolist() == list(range(32))


SPACES = [{"tau_space": space, "root": root} for space in (-1.0, 0.45, 1.0) for root in (0, 1)]
CLIPS = ((1, 6, 5), (4, 4, 7), (5, 3, 3))


def of_scenes(_method: STTM, _keep: int, clip: tuple[int, int, int]) -> View:
    frames, rows, columns = clip
    return released_video(SITE, scenes(rows + frames, frames, rows * columns, 5), columns)


test_sttm = check_method(
    "sttm",
    slow_sttm,
    settings=SPACES,
    views=of_scenes,
    varied=CLIPS,
    keeps=lambda size: (1, 5, size // 3, size - 4, size - 1, size),
    released=lambda case: case_video(case, SITE),
)

test_sttm_with_a_threshold_in_time = check_method(
    "sttm",
    slow_sttm,
    settings=[{"tau_time": time, **space} for time in (0.6, 0.9) for space in SPACES],
    views=of_scenes,
    varied=CLIPS,
    keeps=lambda size: (size - 1,),
)


def test_views_of_a_picture_are_merged_apart() -> None:
    tokens = numbers(11, 1, 48, 5)
    grid = grid_of(((0, 0, 4, 6), (0, 1, 6, 4))).unsqueeze(0)
    method = STTM(tau_space=-1.0)
    both = View(SITE, tokens, grid)
    views = [View(SITE, tokens[:, part], grid[:, part]) for part in (slice(0, 24), slice(24, 48))]
    apart = torch.cat([outcome(view, method.plan(view, 7))[0] for view in views])
    torch.testing.assert_close(outcome(both, method.plan(both, 14))[0], apart)


def test_thresholds_set_the_count_and_ratio_0_removes_nothing() -> None:
    adapter, chats = adapter_of("onevision_video"), list(FAMILIES["onevision_video"].chats)
    method = STTM(tau_space=-1.0, tau_time=-1.0, root=0)
    low, none = (kept_by(adapter, method, chats, ratio) for ratio in (0.2, 0.0))
    for record, whole in zip(low.records, none.records, strict=True):
        assert record.kept[-1] < 0.8 * record.visual
        assert whole.kept[-1] == whole.visual
