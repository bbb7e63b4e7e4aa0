"""What the simple methods and VisionZip promise, against slow references."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from espalier.methods.base import View
from espalier.methods.center import Center
from espalier.methods.none import NoReduction
from espalier.methods.pooled import Pooled
from espalier.methods.random import Random
from espalier.methods.uniform import Uniform
from espalier.methods.visionzip import VisionZip
from tests.methods.cases import SAMPLES, SQUARE, generators_for, make_view
from tests.methods.crop_views import best, crops_with_shares
from tests.methods.twins import check_method, outcome, seeded, slow_highest

test_fastv = check_method(
    "fastv",
    partial(slow_highest, lambda method: f"{method.queries}_attention"),
    settings=({}, {"queries": "mean"}),
    keeps=(1, 20, 47),
)


def slow_random(_method: Random, view: View, row: int, keep: int) -> list[int]:
    noise = torch.rand(view.tokens.shape[1], generator=generators_for([row])[0])
    pairs = crops_with_shares(view, row, keep)
    return [token for tokens, share in pairs for token in best(noise, tokens, share)]


def slow_center(_method: Center, view: View, row: int, keep: int) -> list[int]:
    kept: list[int] = []
    for tokens, share in crops_with_shares(view, row, keep):
        places = view.grid[row, tokens, 2:].tolist()
        height, width = (max(axis) + 1 for axis in zip(*places, strict=True))
        near = [
            -(((2 * r + 1 - height) / height) ** 2) - ((2 * c + 1 - width) / width) ** 2
            for r, c in places
        ]
        kept += [tokens[place] for place in best(near, list(range(len(tokens))), share)]
    return kept


def slow_regions(view: View, row: int, keep: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the central token of each region of the grid, and all of its tokens: bands of rows, and runs in each."""
    for tokens, share in crops_with_shares(view, row, keep):
        token_at = {tuple(view.grid[row, token, 2:].tolist()): token for token in tokens}
        height, width = (max(axis) + 1 for axis in zip(*token_at, strict=True))
        ideal = round(math.sqrt(share * height / width))
        bands = max(min(ideal, height, share), math.ceil(share / width))
        for band in range(bands):
            rows = range(band * height // bands, (band + 1) * height // bands)
            runs = (band + 1) * share // bands - band * share // bands
            for run in range(runs):
                columns = range(run * width // runs, (run + 1) * width // runs)
                middle = ((rows[0] + rows[-1]) // 2, (columns[0] + columns[-1]) // 2)
                yield token_at[middle], [token_at[r, c] for r in rows for c in columns]


def slow_uniform(_method: Uniform, view: View, row: int, keep: int) -> list[int]:
    return [centre for centre, _ in slow_regions(view, row, keep)]


def slow_pooled(_method: Pooled, view: View, row: int, keep: int) -> dict[int, torch.Tensor]:
    regions = slow_regions(view, row, keep)
    return {centre: view.tokens[row, region].mean(dim=0) for centre, region in regions}


GRIDS = {"samples": SAMPLES, "square": SQUARE, "two": [((0, 0, 6, 6), (1, 0, 3, 4))]}
COUNTS = (1, 3, 5, 7, 11, 12, 14, 24, 36, 47, 48, 50, 72, 143, 144)
ON_GRIDS: dict[str, Any] = {
    "views": lambda method, _keep, name: make_view(method, GRIDS[name]),
    "varied": GRIDS,
    "keeps": lambda n_tokens: [count for count in COUNTS if count <= n_tokens],
}

test_random = check_method("random", slow_random, **ON_GRIDS)
test_center = check_method("center", slow_center, **ON_GRIDS)
test_uniform = check_method("uniform", slow_uniform, **ON_GRIDS)
test_downsample = check_method("downsample", slow_uniform, **ON_GRIDS)
test_pooled = check_method("pooled", slow_pooled, **ON_GRIDS)


def test_none_acts_nowhere():
    assert NoReduction().sites(6) == ()


def test_random_depends_on_the_sample_and_not_on_the_batch():
    view = make_view(Random(), SQUARE * 3)
    first = Random().plan(view, 20).kept
    again = replace(view, generators=generators_for([2, 1, 0]))
    assert torch.equal(Random().plan(again, 20).kept.flip(0), first)
    assert not torch.equal(first[0], first[1])


def test_random_is_uniform():
    view = replace(make_view(Random(), SQUARE * 400), generators=generators_for(range(400)))
    counts = Random().plan(view, 36).kept.flatten().bincount(minlength=144).float()
    # 100 expected, standard deviation 8.7: six of them leave no room for a lost or doubled corner.
    assert 100 - 52 < counts.min() < counts.max() < 100 + 52


def test_uniform_is_a_regular_lattice_where_the_count_allows():
    assert Uniform().plan(make_view(Uniform(), SQUARE), 36).kept[0].tolist() == [
        12 * row + column for row in range(0, 12, 2) for column in range(0, 12, 2)
    ]


def test_pooled_by_four_is_average_pooling():
    view = make_view(Pooled(), SQUARE * 2)
    image = view.tokens.transpose(1, 2).unflatten(2, (12, 12))
    wanted = torch.nn.functional.avg_pool2d(image, 2).flatten(2).transpose(1, 2)
    assert torch.allclose(outcome(view, Pooled().plan(view, 36)), wanted, atol=1e-6)


# ---------------------------------------------------------------- VisionZip


def slow_visionzip(method: VisionZip, view: View, row: int, keep: int) -> dict[int, torch.Tensor]:
    """What is kept, and what it becomes, step by step."""
    scores = view.signals["cls_attention"][row].tolist()
    keys = torch.nn.functional.normalize(view.signals["tower_keys"][row].double(), dim=1)
    tokens = view.tokens[row].double()
    n = len(scores)
    n_dominant = math.floor(keep * 54 / 64 + 0.5)
    dominant = sorted(range(n), key=lambda i: (-scores[i], i))[:n_dominant]
    rest = [i for i in range(n) if i not in dominant]
    n_targets = keep - n_dominant
    targets = rest[:: max(1, len(rest) // n_targets)][:n_targets] if n_targets else []
    groups: dict[int, list[int]] = {target: [] for target in targets}
    for i in rest:
        if i not in targets and targets:
            groups[max(targets, key=lambda t: (float(keys[i] @ keys[t]), -t))].append(i)
    values = {i: tokens[i] for i in dominant}
    for target, group in groups.items():
        if method.contextual == "mean":
            values[target] = tokens[[target, *group]].mean(dim=0)
        else:
            others = tokens[group].mean(dim=0) if group else 0
            values[target] = tokens[target] + others
    return values


test_visionzip = check_method(
    "visionzip",
    slow_visionzip,
    settings=({"contextual": "mean"}, {"contextual": "target_plus_mean"}),
    views=seeded(SQUARE * 2),
    keeps=(1, 2, 3, 13, 32, 64, 130, 143),
)


@pytest.mark.parametrize(("keep", "n_dominant"), [(192, 162), (128, 108), (64, 54)])
def test_visionzip_splits_as_published(keep: int, n_dominant: int):
    view = make_view(VisionZip(), [((0, 0, 24, 24),)])
    plan = VisionZip().plan(view, keep)
    best = view.signals["cls_attention"][0].argsort(descending=True)[:n_dominant]
    assert torch.isin(best, plan.kept[0]).all()
    own_slot_only = plan.merge.slot[0].bincount()[plan.merge.slot[0, best]]
    assert (own_slot_only == 1).all()  # nothing joins a dominant token
    assert (plan.merge.slot[0] >= 0).all()  # and every other token goes somewhere


def test_the_centre_is_an_ellipse_of_the_view():
    """6 x 8: of the 4 middle tokens all have the same distance, and a crop of a quarter keeps the view's shape."""
    view = make_view(Center(), [((0, 0, 6, 8),)])
    assert Center().plan(view, 4).kept[0].tolist() == [2 * 8 + 3, 2 * 8 + 4, 3 * 8 + 3, 3 * 8 + 4]
    assert Center().plan(view, 2).kept[0].tolist() == [2 * 8 + 3, 2 * 8 + 4]
    # Next are the neighbours to the sides, at (3/8)^2 + (1/6)^2, before those above and below, at (1/8)^2 + (3/6)^2.
    assert Center().plan(view, 8).kept[0].tolist() == [18, 19, 20, 21, 26, 27, 28, 29]


def test_every_frame_keeps_its_own_centre():
    view = make_view(Center(), [((0, 0, 3, 3), (1, 0, 3, 3), (2, 0, 1, 3))])
    assert Center().plan(view, 7).kept[0].tolist() == [1, 3, 4, 10, 12, 13, 19]
