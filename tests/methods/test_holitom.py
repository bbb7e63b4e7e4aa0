"""HoliTom against a slow version, by hand, on models, and against what its released code keeps and merges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import View
from espalier.methods.holitom import HoliTom
from espalier.methods.select.stills import still_places, windows
from tests.methods.cases import PREFIX
from tests.methods.crop_views import slow_apportion
from tests.methods.released import case_video, numbers, released_video, scenes, shares
from tests.methods.slow import peaks
from tests.methods.twins import best, check_method, outcome


def slow_holitom(method: HoliTom, view: View, _row: int, keep: int) -> dict[int, Tensor]:
    """One video: every cut is tried, and every token put in its place."""
    tokens, size = view.tokens[0].double(), 9
    n_frames = len(tokens) // size
    attention = view.signals["cls_attention"][0].tolist()

    def like(frame: int, place: int) -> float:
        pair = tokens[frame * size + place], tokens[(frame + 1) * size + place]
        return float(cosine_similarity(*pair, dim=0))

    def still(first: int, last: int) -> list[int]:
        frames = range(first, last)
        return [i for i in range(size) if all(like(f, i) > method.tau for f in frames)]

    def spared(runs: list[tuple[int, int]]) -> int:
        return sum((last - first) * len(still(first, last)) for first, last in runs if last > first)

    # Of equal cuts the one whose last window is shorter, then the one before, and so on.
    runs = max(cuts(n_frames), key=lambda cut: (spared(cut), [a - b for a, b in reversed(cut)]))
    places = {run: set(still(*run)) if run[1] > run[0] else set() for run in runs}
    pairs = [
        (min(like(f, i) for f in range(*run)), number, i)
        for number, run in enumerate(runs)
        for i in places[run]
    ]
    left = n_frames * size - spared(runs)
    for _, number, place in sorted(pairs):
        if left >= keep:
            break
        places[runs[number]].remove(place)
        left += runs[number][1] - runs[number][0]
    parts: list[list[list[int]]] = []
    for run in runs:
        frames = range(run[0], run[1] + 1)
        parts.append([[f * size + i for f in frames] for i in sorted(places[run])])
        parts += [[[f * size + i] for i in range(size) if i not in places[run]] for f in frames]
    values: dict[int, Tensor] = {}
    lengths = [len(part) for part in parts]
    for part, quota in zip(parts, slow_apportion(lengths, lengths, keep), strict=True):
        if part and len(part[0]) > 1:
            values |= slow_clusters(method, tokens, part, quota)
        else:
            best = sorted(part, key=lambda entry: (-attention[entry[0]], entry[0]))[:quota]
            values |= {entry[0]: tokens[entry[0]] for entry in best}
    return values


def cuts(n_frames: int) -> list[list[tuple[int, int]]]:
    """Every way to cut a video into windows."""
    if n_frames == 0:
        return [[]]
    return [[*before, (first, n_frames - 1)] for first in range(n_frames) for before in cuts(first)]


def slow_clusters(
    method: HoliTom, tokens: Tensor, part: list[list[int]], quota: int
) -> dict[int, Tensor]:
    means = [tokens[entry].mean(0) for entry in part]
    squared = [[float((a - b).square().mean()) for b in means] for a in means]
    centres = peaks(squared, min(method.K, quota), quota)
    joined: dict[int, list[Tensor]] = {centre: [] for centre in centres}
    for i in range(len(means)):
        if centres and i not in centres:
            joined[min(joined, key=lambda centre: squared[i][centre])].append(means[i])
    return {
        part[centre][0]: method.beta * means[centre]
        + (1 - method.beta) * torch.stack(others).mean(0)
        if others
        else means[centre]
        for centre, others in joined.items()
    }


def test_windows_by_hand() -> None:
    """Place 0 is still in frames 0 to 2, places 1 and 2 in 1 to 3: 2 * 1 tokens are spared by 0-2, 2 * 2 by 1-3."""
    still = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 1, 1]]).bool()
    assert windows(still) == [(0, 0), (1, 3)]
    assert windows(still[:2]) == [(0, 0), (1, 2)]  # 3 are spared, 2 by 0-2
    assert (windows(~still), windows(still[:0])) == ([(0, 1), (2, 3)], [(0, 0)])


def test_two_frames_by_hand() -> None:
    """Places 0 and 1 stand still, and 2 moves: two tokens of the first frame and one of each frame are left."""
    tokens = torch.tensor([[[2.0, 0], [0, 2], [1, 1]], [[4, 0], [0, 6], [-1, 1]]])
    view = released_video(PREFIX, tokens, 3, cls_attention=torch.tensor([[9.0, 9, 1, 9, 9, 2]]))
    plan = HoliTom().plan(view, 4)
    assert plan.kept.tolist() == [[0, 1, 2, 5]]
    assert outcome(view, plan)[0].tolist() == [[3, 0], [0, 4], [1, 1], [-1, 1]]
    # Shares of 3 are 1.5, 0.75 and 0.75 of two, one and one: one centre. Of equal density, 0 is the denser.
    plan = HoliTom().plan(view, 3)
    assert plan.kept.tolist() == [[0, 2, 5]]
    torch.testing.assert_close(outcome(view, plan)[0][0], torch.tensor([0.6 * 3, 0.4 * 4]))
    # Five cannot be left with both places still: the later of two equal ones stays still.
    alike = torch.tensor([[1.0, 1.0, 0.0]])
    assert still_places(alike, [(0, 1)], 0.8, 5).tolist() == [[False, True, False]]


def released_holitom(case: dict[str, Any]) -> View:
    n_tokens = case["frames"] * case["rows"] * case["columns"]
    return case_video(case, PREFIX, cls_attention=shares(case["seed"] + 200, 1, n_tokens))


test_holitom = check_method(
    "holitom",
    slow_holitom,
    settings=({}, {"tau": 0.9, "beta": 0.1, "K": 2}),
    views=lambda _method, keep, frames: released_video(
        PREFIX,
        scenes(frames + keep, frames, 9, 6),
        3,
        cls_attention=shares(keep, 1, 9 * frames),
    ),
    varied=(1, 5, 6, 7),
    keeps={9: (5,), 45: (7,), 54: (54,), 63: (30, 60)}.__getitem__,
    released=released_holitom,
)


def slow_halves(_method: HoliTom, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """The second stage, token by token."""
    tokens, kept = view.tokens[row], best(view.signals["last_attention"][row].tolist(), keep)
    values = {token: tokens[token] for token in kept}
    for token in range(len(tokens)):
        if token not in kept:
            like = [float(cosine_similarity(tokens[token], tokens[k], dim=0)) for k in kept]
            place = kept[like.index(max(like))]
            values[place] = (values[place] + tokens[token]) / 2
    return values


test_holitom_in_the_decoder = check_method(
    "holitom",
    slow_halves,
    views=lambda method, _keep: View(
        method.sites(28)[1],
        numbers(3, 1, 30, 4),
        torch.zeros(1, 30, 4, dtype=torch.long),
        {"last_attention": shares(4, 1, 30)},
    ),
    keeps=(6,),
    atol=1e-6,
)
