"""RTPrune's dynamic ratio: its equations, the counts it gives, rows that keep other counts, and the mean of a set."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from PIL import Image

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.session import Session
from espalier.methods.base import MethodError, Need, Site, View
from espalier.methods.none import NoReduction
from espalier.methods.rtprune import RTPrune
from espalier.methods.select.page_share import own_count
from tests.family_runs import adapter_of
from tests.methods.cases import SQUARE, make_view, replaced, rows_of_view
from tests.methods.runs import check_adaptive
from tests.runs.helpers import make_bench
from tests.tiny import chat

DYNAMIC = RTPrune(ratio="dynamic")


def slow_share(method: RTPrune, view: View, row: int) -> float:
    """1 - phi (1 - rho), pair by pair and pixel by pixel in fp64."""
    x = view.tokens[row].double().numpy()
    units = [vector / max(1e-12, math.sqrt(float(vector @ vector))) for vector in x]
    n = len(x)
    pairs = [float(units[i] @ units[j]) for i in range(n) for j in range(n) if i != j]
    phi = sum(c**method.similarity_power for c in pairs) / (n * (n - 1))
    kernel = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]])
    densities = []
    for place, luma in zip(view.grid[row].tolist(), view.signals["luma"][row], strict=True):
        if place[1] != 0:
            continue
        patch = luma.double().numpy()
        if method.border == "patch":
            patch = np.pad(patch[1:-1, 1:-1], 1)
        side = len(patch) - 2
        windows = [patch[y : y + 3, x : x + 3] for y in range(side) for x in range(side)]
        steep = [math.hypot((kernel * w).sum(), (kernel.T * w).sum()) > method.tau for w in windows]
        densities.append(sum(steep) / len(steep))
    return 1 - phi * (1 - fmean(densities))


def page_view(method: RTPrune, tilings=SQUARE, seed: int = 0) -> View:
    """Tokens that resemble each other, and pixels that are flat under two of three tokens."""
    view = make_view(method, tilings, seed=seed)
    luma = view.signals["luma"].clone()
    luma[:, 1::3] = luma[:, 2::3] = 0.01
    return replaced(view, view.tokens + 1.0, luma=luma)


# ---------------------------------------------------------------- the share


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("border", ["patch", "image"])
@pytest.mark.parametrize("tau", [0.0, 0.2, 3.0])
def test_the_share_equals_the_slow_one(border, power: int, tau: float):
    method = replace(DYNAMIC, border=border, similarity_power=power, tau=tau)
    view = page_view(method, [((0, 0, 4, 4), (0, 1, 2, 4)), ((0, 0, 4, 4), (0, 1, 4, 2))])
    for row, share in enumerate(method.own_share(view).tolist()):
        assert share == pytest.approx(slow_share(method, view, row), abs=1e-5)


def test_a_worked_example():
    """Tokens at right angles and in between; pixels of which three in ten are steep."""
    tokens = torch.tensor([[[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]])
    luma = torch.zeros(1, 3, 3, 12)  # 1 x 10 pixels: a slope of one step makes two of them steep
    luma[..., 4:] = 0.5
    luma[..., 11:] = 5.0  # the border makes one more
    view = replace(make_view(DYNAMIC, [((0, 0, 1, 3),)]), tokens=tokens, signals={"luma": luma})
    whole = replace(DYNAMIC, border="image")
    assert whole.own_share(view).item() == pytest.approx(1 - 0.3333 * 0.7, abs=1e-4)
    plain = replace(whole, similarity_power=1)
    assert plain.own_share(view).item() == pytest.approx(1 - 0.4667 * 0.7, abs=1e-4)


def test_opposite_tokens_keep_everything():
    """The plain mean of cosines may be below 0; no sample keeps more than its all."""
    view = replace(
        make_view(DYNAMIC, [((0, 0, 1, 2),)]),
        tokens=torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]),
        signals={"luma": torch.zeros(1, 2, 6, 6)},
    )
    assert replace(DYNAMIC, similarity_power=1).own_share(view).item() == 1.0
    assert (DYNAMIC.own_share(view).item(), DYNAMIC.plan(view, 1).kept.tolist()) == (0.0, [[0]])


# ---------------------------------------------------------------- the count


@pytest.mark.parametrize(
    ("share", "unit", "n", "count"),
    [
        (0.5, 100, 144, 50),
        (0.625, 100, 144, 63),
        (1.0, 300, 144, 144),
        (0.0, 100, 144, 1),
        (0.5, 1, 9, 1),
    ],
)
def test_counts_are_rounded_and_bounded(share: float, unit: float, n: int, count: int):
    assert own_count(torch.tensor([share]), unit, n) == count


def test_the_count_grows_with_the_budget_and_the_choice_is_the_fixed_ones():
    view = page_view(DYNAMIC)
    counts = [DYNAMIC.plan(view, keep).kept.shape[1] for keep in (1, 20, 60, 100, 144)]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[2]
    plan = DYNAMIC.plan(view, 60)
    fixed = RTPrune().plan(view, counts[2])
    assert torch.equal(plan.kept, fixed.kept)
    assert torch.equal(plan.merge.matrix, fixed.merge.matrix)  # type: ignore[union-attr]


def test_nothing_to_remove_keeps_all():
    view = page_view(DYNAMIC)
    assert DYNAMIC.own_share(view).item() < DYNAMIC.typical
    plan = DYNAMIC.plan(view, 144)
    assert (plan.kept.tolist(), plan.merge) == ([list(range(144))], None)


def test_rows_are_decided_one_at_a_time():
    view = page_view(DYNAMIC, SQUARE * 2)
    luma = view.signals["luma"].clone()
    luma[1] = 0
    view = replaced(view, luma=luma)
    with pytest.raises(MethodError, match="one row at a time, and 2 rows differ"):
        DYNAMIC.plan(view, 70)
    counts = [DYNAMIC.plan(rows_of_view(view, [row]), 70).kept.shape[1] for row in range(2)]
    assert counts[0] > counts[1]


@pytest.mark.parametrize("key", ["tokens", "luma"])
def test_what_is_not_finite_is_an_error(key: str):
    view = page_view(DYNAMIC)
    bad = (view.tokens if key == "tokens" else view.signals["luma"]).clone()
    bad[0, 5, 2] = float("nan")
    changed = replaced(view, bad) if key == "tokens" else replaced(view, luma=bad)
    with pytest.raises(MethodError, match="NaN or infinite"):
        DYNAMIC.plan(changed, 70)


def test_only_the_dynamic_ratio_is_adaptive_and_reads_pixels():
    assert (DYNAMIC.adaptive, RTPrune().adaptive, NoReduction().adaptive) == (True, False, False)
    assert DYNAMIC.needs(Site("prefix")) == (Need("luma"),)


# ---------------------------------------------------------------- the engine


def page(kind: str, width: int, height: int, seed: int = 0) -> Image.Image:
    """Grey, noise, or grey with noise on its left half: pages with more and less on them."""
    pixels = np.full((height, width, 3), 127, dtype=np.uint8)
    noise = np.random.default_rng(seed).integers(0, 256, pixels.shape, dtype=np.uint8)
    covered = {"blank": 0, "half": width // 2, "full": width}[kind]
    pixels[:, :covered] = noise[:, :covered]
    return Image.fromarray(pixels)


#: Three rows of one image each; on a small grid, a tiny model's tokens differ enough for other counts.
PAGES = [
    chat("w1 w2 w3", page("blank", 48, 48)),
    chat("w4", page("half", 48, 48, 1)),
    chat("w5 w6 w7 w8 w9", page("full", 48, 48, 2)),
]
NAMES = (
    *("llava", "llava_next", "internvl"),
    *("deepseek_ocr", "deepseek_ocr_gundam", "deepseek_ocr2"),
)
#: Far from the tiny models' own shares, so that counts are no bounds.
ENGINE = RTPrune(ratio="dynamic", typical=1.0)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_keep_the_counts_they_keep_alone(name: str):
    def count(view: View, allowed: int) -> int:
        return max(1, math.floor(allowed * slow_share(ENGINE, view, 0) + 0.5))

    check_adaptive(adapter_of(name), ENGINE, PAGES, 0.3, count)


def test_beams_of_a_row_keep_what_it_keeps():
    adapter = adapter_of("llava")
    inputs = adapter.encode(PAGES)
    with Session(adapter, ENGINE, Budget("kept", 0.3)) as session:
        beams = session.generate(inputs, max_new_tokens=3, do_sample=False, num_beams=2)
        greedy = session.generate(inputs, max_new_tokens=3, do_sample=False)
    assert [record.kept for record in beams.records] == [record.kept for record in greedy.records]


@pytest.mark.slow
def test_a_row_of_results_says_that_counts_are_the_methods_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    bench = make_bench(tmp_path / "store", capsys, monkeypatch)
    for name, adaptive in (("rtprune_dynamic", True), ("rtprune", False)):
        assert bench.success(f"method={name}", "ratio=0.5").last["extra"]["adaptive"] is adaptive
