"""LLaVA-Scissor against a slow version, by hand, on models, and against what its released code makes of tokens."""

from __future__ import annotations

from bisect import bisect_left
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import View
from espalier.methods.scissor import Scissor
from tests.methods.cases import PREFIX
from tests.methods.released import case_video, released_video, scenes
from tests.methods.twins import check_method, check_released, outcome


def slow_scissor(method: Scissor, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """One video, pair by pair: what stands at each kept token."""
    tokens, size, tau = view.tokens[row].double(), 9, method.tau
    points = dict(enumerate(tokens))

    def left(tau: float) -> int:
        return len(components(components(points, tau, 1, size), tau, 1))

    if tau is None:
        tau = (bisect_left(range(-100, 101), keep, key=lambda n: left(n / 100)) - 100) / 100
    means = components(components(points, tau, keep, size), tau, keep, below=True)
    into: dict[int, list[Tensor]] = {place: [means[place]] for place in means}
    for token in tokens:
        like = {place: float(cosine_similarity(token, means[place], dim=0)) for place in means}
        into[max(means, key=lambda place: like[place])].append(token)
    return {place: torch.stack(values).mean(dim=0) for place, values in into.items()}


def components(
    points: dict[int, Tensor], tau: float, fewest: int, size: int = 9**9, below: bool = False
) -> dict[int, Tensor]:
    """Means of components by place: pairs of a frame join from the likest on, above tau or also below."""
    places, values = list(points), torch.stack(list(points.values()))
    alike = cosine_similarity(values.unsqueeze(0), values.unsqueeze(1), dim=2).tolist()
    pairs = {
        (places[i], places[j]): alike[i][j]
        for i, j in combinations(range(len(places)), 2)
        if places[i] // size == places[j] // size
    }
    group = {place: place for place in places}
    for first, second in sorted(pairs, key=lambda pair: -pairs[pair]):
        if len(set(group.values())) == fewest or (pairs[first, second] <= tau and not below):
            break
        old, new = group[second], group[first]
        group = {place: new if label == old else label for place, label in group.items()}
    degree = dict.fromkeys(places, 0)
    for pair in pairs:
        for place in pair:
            degree[place] += pairs[pair] > tau
    members = [[p for p in places if group[p] == label] for label in set(group.values())]
    means = {
        min(part, key=lambda place: (-degree[place], place)): torch.stack(
            [points[place] for place in part]
        ).mean(dim=0)
        for part in members
    }
    return dict(sorted(means.items()))


def test_two_frames_by_hand() -> None:
    """Frame 0 has a pair with cosine 0.8, and (0, 2), which frame 1 has as (0, 4) among three unlike tokens.

    The pair's mean takes both tokens again, as does (0, 3); (-3, 0) and (0, -1) stay as they are.
    """
    tokens = torch.tensor([[[2.0, 0], [1.6, 1.2], [0, 2]], [[0, 4], [-3, 0], [0, -1]]])
    view = released_video(PREFIX, tokens, 3)
    first = [(1.8 + 2 + 1.6) / 3, (0.6 + 0 + 1.2) / 3]
    for tau in (0.75, 0.79):
        plan = Scissor(tau=tau).plan(view, 4)
        assert plan.kept.tolist() == [[0, 2, 4, 5]]
        values = [first, [0, 3], [-3, 0], [0, -1]]
        torch.testing.assert_close(outcome(view, plan)[0], torch.tensor(values))
    # Solved: 0.8 and more leave 5, since the pair's cosine is 0.8.
    torch.testing.assert_close(Scissor().plan(view, 4).kept, plan.kept)
    assert Scissor().plan(view, 5).kept.tolist() == [[0, 1, 2, 4, 5]]
    # One less than tau leaves: the pair's mean joins (0, 2) and (0, 4), the likest left, and (0, 2) has the more pairs.
    assert Scissor(tau=0.75).plan(view, 3).kept.tolist() == [[2, 4, 5]]
    # Space comes apart where it would leave too few.
    assert Scissor(tau=0.75).plan(view, 6).kept.tolist() == [[0, 1, 2, 3, 4, 5]]


def released_scissor(case: dict[str, Any]) -> None:
    for tau in (None, case["tau"]):
        check_released(Scissor(tau=tau), case_video(case, PREFIX), case)


test_scissor = check_method(
    "scissor",
    slow_scissor,
    settings=({}, {"tau": 0.8}, {"tau": 0.3}),
    views=lambda _method, keep, frames: released_video(
        PREFIX, scenes(frames + keep, frames, 9, 4), 3
    ),
    varied=(1, 3, 4),
    keeps={9: (4,), 27: (26,), 36: (7, 20)}.__getitem__,
    released=released_scissor,
)
