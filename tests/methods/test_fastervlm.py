"""FasterVLM: the same share of every crop, by the class token's attention."""

from __future__ import annotations

import pytest
import torch

from espalier.methods.base import Site, View
from espalier.methods.fastervlm import FasterVLM
from tests.methods.crop_views import ROWS, best, crop_view, cropped, groups, joined, slow_apportion
from tests.methods.runs import check_on_engine
from tests.methods.twins import check_slow


def view_of(grid, tile, scores):
    signals = {"cls_attention": scores, "tile": tile}
    return View(Site("prefix"), torch.zeros(*grid.shape[:2], 2), grid, signals)


def slow_fastervlm(method: FasterVLM, view: View, row: int, keep: int) -> list[int]:
    scores = view.signals["cls_attention"][row]
    found = groups(view.grid[row], view.signals["tile"][row])
    sizes = [len(tokens) for tokens in found.values()]
    pairs = zip(found.values(), slow_apportion(sizes, sizes, keep), strict=True)
    return sorted(token for tokens, quota in pairs for token in best(scores, tokens, quota))


@pytest.mark.parametrize("name", ROWS)
def test_equals_the_slow_one(name: str):
    check_slow(FasterVLM(), crop_view(FasterVLM(), name), slow_fastervlm)


def test_five_full_tiles_keep_as_many_each():
    """The released setting for LLaVA-NeXT: k of each of five tiles, whatever the scores of one against another."""
    grid, tile = ROWS["square"]
    scores = torch.rand(1, 80, generator=torch.Generator().manual_seed(1)) + 10 * (tile == 2)
    kept = FasterVLM().plan(view_of(grid, tile, scores), 20).kept[0]
    assert tile[0, kept].bincount().tolist() == [4] * 5
    of_two = scores[0, tile[0] == 2].topk(4).values.sort().values
    assert torch.equal(scores[0, kept[tile[0, kept] == 2]].sort().values, of_two)


def test_one_view_is_the_best_of_it_with_ties_to_the_lower_index():
    grid, tile = joined(cropped(3))
    scores = torch.tensor([[0.0, 1, 1, 1, 1, 0, 2, 0, 0]])
    assert FasterVLM().plan(view_of(grid, tile, scores), 3).kept.tolist() == [[1, 2, 6]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    ["llava", "llava_next", "onevision_image", "onevision_video", "qwen2_5_vl", "internvl"],
)
def test_on_models(name: str):
    check_on_engine(name, FasterVLM(), slow_fastervlm)
