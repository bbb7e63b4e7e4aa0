"""PruneVid against a slow version, by hand, on models, and against what its released code merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import View
from espalier.methods.prunevid import PruneVid
from espalier.methods.select.segments import segments_of
from espalier.methods.select.stills import pair_mean
from tests.methods.cases import PREFIX
from tests.methods.crop_views import best, crops_with_shares, slow_apportion
from tests.methods.released import numbers, released_video, scenes, shares
from tests.methods.slow import peaks
from tests.methods.twins import check_method, outcome


def slow_prunevid(method: PruneVid, view: View, _row: int, keep: int) -> dict[int, Tensor]:
    """One video, by the text: pairs of frames one by one, and clusters as lists."""
    size = 9
    frames = view.tokens[0].double().unflatten(0, (-1, size))
    means = [frame.mean(0) for frame in frames]
    clusters = slow_clusters(means, max(1, int(len(frames) * method.gamma + 1e-9)))
    label = {frame: centre for centre, members in clusters.items() for frame in members}
    segments = segments_of([label[frame] for frame in range(len(frames))])
    static: dict[tuple[int, int], float] = {}
    for number, (first, last) in enumerate(segments):
        for place in range(size):
            inside = range(first, last + 1)
            pairs = [(a, b) for a in inside for b in inside if a != b]
            like = [
                float(cosine_similarity(frames[a, place], frames[b, place], dim=0))
                for a, b in pairs
            ]
            if like and sum(like) / len(like) > method.tau:
                static[number, place] = sum(like) / len(like)
    lengths = [last - first for first, last in segments]
    left = len(frames) * size - sum(lengths[number] for number, _ in static)
    for number, place in sorted(static, key=lambda key: (static[key], key)):
        if left < keep:
            del static[number, place]
            left += lengths[number]
    parts: list[list[list[int]]] = []
    for number, (first, last) in enumerate(segments):
        still, inside = [p for n, p in static if n == number], range(first, last + 1)
        parts.append([[f * size + place for f in inside] for place in sorted(still)])
        parts += [[[f * size + i] for i in range(size) if i not in still] for f in inside]
    counts, values = [len(part) for part in parts], dict[int, Tensor]()
    for part, quota in zip(parts, slow_apportion(counts, counts, keep), strict=True):
        tokens = [frames.flatten(0, 1)[entry].mean(0) for entry in part]
        for centre, members in slow_clusters(tokens, quota).items():
            values[part[centre][0]] = torch.stack([tokens[i] for i in members]).mean(0)
    return values


def slow_clusters(values: list[Tensor], count: int) -> dict[int, list[int]]:
    """Members of the cluster of each density peak."""
    squared = [[float((a - b).square().mean()) for b in values] for a in values]
    centres = peaks(squared, min(7, len(values)), count)
    members: dict[int, list[int]] = {centre: [centre] for centre in centres}
    for i in range(len(values)):
        if centres and i not in centres:
            members[min(centres, key=lambda centre: squared[i][centre])].append(i)
    return members


#: Clusters of 15 frames, and the lengths of the segments that `refine_clusters` and `segment_lengths` of the released
#: code make of them; provenance as in released.json.
SEGMENTS = (
    ("001120003311222", "53223"),
    ("010122001112333", "6243"),
    ("333001100211230", "32235"),
    ("400100222003311", "63222"),
)


@pytest.mark.parametrize(("labels", "lengths"), SEGMENTS)
def test_segments_are_those_of_the_released_code(labels: str, lengths: str) -> None:
    segments = segments_of(list(map(int, labels)))
    assert [last - first + 1 for first, last in segments] == list(map(int, lengths))
    assert segments_of([0, 1, 2] * 5) == [(0, 14)]


def test_two_frames_by_hand() -> None:
    """Place 0 is static, a third of three tokens; of 1 and 2 each frame keeps one, the mean of both."""
    tokens = torch.tensor([[[2.0, 0], [0, 2], [0, 4]], [[4, 0], [-1, 1], [-3, 3]]])
    view = released_video(PREFIX, tokens, 3)
    assert pair_mean(tokens / tokens.norm(dim=2, keepdim=True))[0] == pytest.approx(1.0)
    plan = PruneVid().plan(view, 3)
    # Two points are equally dense: the first counts as denser, and the second is as far from it.
    assert plan.kept.tolist() == [[0, 1, 4]]
    assert outcome(view, plan)[0].tolist() == [[3, 0], [0, 3], [-2, 2]]


def released_prunevid(case: dict[str, Any]) -> None:
    size = case["rows"] * case["columns"]
    tokens = scenes(case["seed"], case["frames"], size, case["width"])
    if case["loose"]:
        loose = numbers(case["seed"] + 90, case["frames"], case["loose"], case["width"])
        tokens[:, size - case["loose"] :] = loose
    view = released_video(PREFIX, tokens, case["columns"])
    plan = PruneVid(**case["params"]).plan(view, case["keep"])
    sums = outcome(view, plan)[0].double().sum(dim=1)
    assert sorted(sums.tolist()) == pytest.approx(case["sums"], abs=2e-4)


test_prunevid = check_method(
    "prunevid",
    slow_prunevid,
    settings=({}, {"tau": 0.9, "gamma": 0.5}),
    views=lambda _method, keep, frames: released_video(
        PREFIX, scenes(frames + keep, frames, 9, 6), 3
    ),
    varied=(1, 5, 6, 9),
    keeps={9: (5,), 45: (7,), 54: (54,), 81: (30, 75)}.__getitem__,
    released=released_prunevid,
)


FRAMES = [*((0, place) for place in range(6)), (1, 0), (1, 3), *((2, p) for p in range(4))]


def slow_shares(_method: PruneVid, view: View, row: int, keep: int) -> dict[int, Tensor]:
    """The second stage: the same share of each frame."""
    scores, frames = view.signals["text_received_peak"][row], crops_with_shares(view, row, keep)
    kept = [token for frame, share in frames for token in best(scores, frame, share)]
    return {token: view.tokens[row, token] for token in kept}


test_prunevid_in_the_decoder = check_method(
    "prunevid",
    slow_shares,
    views=lambda method, _keep: View(
        method.sites(32)[1],
        numbers(3, 1, len(FRAMES), 4),
        torch.tensor([[[frame, 0, 0, place] for frame, place in FRAMES]]),
        {"text_received_peak": shares(7, 1, len(FRAMES))},
    ),
    keeps=(6,),
)
