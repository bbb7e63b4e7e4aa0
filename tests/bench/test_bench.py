"""The benchmark script: pairing, targets, the selection part on tiny sizes, and its output."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.harness.cost.facts import Work
from espalier.harness.cost.flops import sample_flops
from espalier.harness.engine.record import SampleRecord
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.errors import UserError
from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.divprune import DivPrune
from lab.bench import engine_bench as bench_engine
from lab.bench import prefill_bench as bench_prefill
from lab.bench import select_parts as bench_select_parts
from lab.bench import selection_bench as bench_select
from lab.bench import selection_times as bench_selection
from lab.bench import speed_bench as bench
from lab.bench import synthetic_views as bench_views
from lab.bench.bench_page import choose
from lab.bench.bench_setup import Figure, Setup, TimedPair, paired


def test_pairs_run_in_turns_with_the_order_changing() -> None:
    calls: list[str] = []
    pair = paired(lambda: calls.append("a"), lambda: calls.append("b"), repeats=4)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert len(pair.first) == len(pair.second) == 4
    assert min(pair.first + pair.second) > 0


def test_the_ratio_is_the_median_over_pairs_and_not_of_medians() -> None:
    pair = TimedPair((1.0, 10.0, 3.0), (1.0, 5.0, 1.0))
    assert pair.ratios == (1, 2, 3)
    figure = pair.figure("machinery", "x", at_most=1.5)
    assert (figure.value, figure.quartiles) == (2, (1.5, 2.5))


def test_targets_are_upper_or_lower() -> None:
    figures = [
        *(Figure("p", "n", value, "x", at_least=2) for value in (2.0, 1.9)),
        *(Figure("p", "n", 1.02, "x", at_most=most) for most in (1.02, 1.01, None)),
    ]
    assert [figure.met for figure in figures] == [True, False, True, False, None]


def test_parts_are_chosen_by_name_in_their_own_order() -> None:
    assert choose(None, bench.PARTS) == tuple(bench.PARTS)
    assert choose("samples, machinery", bench.PARTS) == ("machinery", "samples")
    with pytest.raises(UserError, match=r"--only='memroy'.*did you mean memory.*batching"):
        choose("memroy", bench.PARTS)


def test_views_carry_every_signal_in_its_shape() -> None:
    tokens = bench_views.features(16, 96)
    needs = tuple(Need(name) for name in SIGNALS)
    view = bench_views.view_of(tokens, Site("prefix"), needs)
    assert set(view.signals) == set(SIGNALS)
    for need in needs:
        axes = bench_views.axes_of(need.signal)
        shape = dict(zip(axes, view.signals[need.key].shape, strict=True))
        assert (shape.get("B", shape.get("P")), shape.get("N", 16)) == (1, 16)
        assert shape.get("T", bench_views.WORDS) == bench_views.WORDS
        assert shape.get("D", 96) == 96
    assert view.grid[0, :, 2:].tolist() == [[i // 4, i % 4] for i in range(16)]
    assert torch.equal(tokens, bench_views.features(16, 96))


@pytest.mark.parametrize(("n", "rows"), [(576, 24), (2880, 48), (25088, 128), (7, 1)])
def test_tokens_fill_one_rectangle(n: int, rows: int) -> None:
    assert bench_views.plane(n) == (rows, n // rows)
    tokens = bench_views.features(n, 2)
    view = bench_views.view_of(tokens, Site("prefix"), (), of_frames=True)
    assert tokens.shape == (1, n, 2)
    assert view.grid.amax(dim=1).tolist() == [[rows - 1, 0, 0, n // rows - 1]]


def test_selection_times_methods_and_leaves_out_those_without_sites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_selection, "SIZES", ((36, 96),))
    monkeypatch.setattr(bench_selection, "configured_methods", lambda: ["none", "divprune"])
    now = [0.0]
    monkeypatch.setattr(
        bench_selection, "paired", partial(paired, clock=lambda: now[0])
    )  # moves by 2 s a product and 6 s a plan

    def product_of(tokens: Tensor) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + 2)

    def plan(method: DivPrune, view: View, keep: int) -> Plan:
        now[0] += 6
        return Plan(torch.arange(keep)[None])

    monkeypatch.setattr(bench_selection, "product_of", product_of)
    monkeypatch.setattr(DivPrune, "plan", plan)
    threads = torch.get_num_threads()
    figures = bench_selection.selection(Setup(quick=True))
    assert torch.get_num_threads() == threads
    assert [figure.name for figure in figures] == [
        "the product itself, N=36 d=96",
        "divprune, N=36 d=96 keep=4",
    ]
    assert [(figure.value, figure.unit) for figure in figures] == [(2000, "ms"), (3, "x")]


def test_a_round_compares_each_method_with_the_products_beside_it() -> None:
    """A clock that each product advances by as much as the number of products so far, and each method by 6."""
    now, products = [0.0], [0]

    def product() -> Tensor:
        products[0] += 1
        now[0] += products[0]
        return torch.zeros(1)

    def ask() -> Tensor:
        now[0] += 6
        return torch.zeros(1)

    questions = [bench_selection.Question(name, name, 1, ask) for name in "abcde"]
    pairs, times = bench_selection.in_rounds(questions, product, 2, lambda: now[0])
    assert times == [2, 3, 4, 5, 6]  # the first is not counted
    assert pairs["a"] == [(6, 2.5), (6, 5.5)]  # in the second round the order is turned
    assert pairs["e"] == [(6, 3.5), (6, 4.5)]


def test_what_would_not_fit_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_select_parts, "free_memory", lambda: 10 * 2**30)

    def reason(seconds: float, peak: int) -> str:
        run = bench_select_parts.Alone(seconds, peak, torch.zeros(1))
        return bench_select_parts.too_large([run], 100.0)

    assert [reason(0.6, 51 * 2**20), reason(0.61, 0), reason(0.0, 2**30)] == [
        "",
        "by the square of the tokens it would take 61 s",
        "by the square of the tokens it would take 100 GiB",
    ]


def test_both_parts_on_tiny_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["divprune", "fastv", "none", "random_layer2"]
    monkeypatch.setattr(bench_select_parts, "configured_methods", lambda: names)
    monkeypatch.setattr(bench_select_parts, "RATIOS", ((36, 96, 3),))
    monkeypatch.setattr(bench_select_parts, "GROWTH", (40, 80))

    def in_this_process(options: Namespace) -> dict[str, Any]:
        return bench_select.measure(Namespace(**{**vars(options), "part": "growth"}))

    monkeypatch.setattr(bench_select, "_second_process", in_this_process)
    assert bench_select.main(["--write", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "bench_select.json").read_text()) == result
    lines = [(row["name"], row["n"], row["keep"], row["way"]) for row in result["rows"]]
    assert lines == [
        ("X X^T", 36, 36, ""),
        ("divprune", 36, 4, ""),
        ("fastv", 36, 4, ""),
        ("random_layer2", 36, 4, ""),
        ("X X^T", 80, 80, ""),
        ("divprune", 80, 8, "held"),
        ("divprune", 80, 8, "computed"),
        ("fastv", 80, 8, ""),
    ]
    assert result["notes"] == [
        "divprune at 80 tokens keeps the same tokens with the matrix held and without."
    ]
    assert all(row["ratio"] > 0 for row in result["rows"])
    assert result["conditions"]["threads"] == 1
    page = (tmp_path / "bench_select.md").read_text()
    assert "| divprune | 80 | 1,024 | 8 | computed |" in page
    assert result["notes"][0] in page


def test_last_line_is_json_with_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(setup: Setup) -> list[Figure]:
        print("noise from a library")
        return [Figure("memory", "peak", 3.5, "MiB"), Figure("memory", "r", 2.0, "x", at_least=2)]

    monkeypatch.setattr(bench, "PARTS", {"memory": part})
    assert bench.main(["--quick"]) == 0
    out, err = capsys.readouterr()
    last = json.loads(out.splitlines()[-1])
    assert [figure["value"] for figure in last["figures"]] == [3.5, 2.0]
    assert [figure["met"] for figure in last["figures"]] == [None, True]
    assert last["conditions"]["quick"] is True
    assert "3.5 MiB" in out
    assert "noise" not in out
    assert "noise" in err


@pytest.mark.slow
def test_the_engine_bench_holds_measured_against_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the embedded model the figures mean little, but every part runs and the pages say what was measured."""
    arguments = ["model=seedling", "--repeats", "2", "--ratio", "0.5", "--write", str(tmp_path)]
    assert bench_engine.main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "bench_engine.json").read_text()) == result
    figures = {
        (figure["part"], figure["name"].partition(",")[0]): figure for figure in result["figures"]
    }
    gain = figures["prefill", "speed-up"]
    allowed = figures["prefill", "speed-up that FLOPs allow"]
    reached = figures["prefill", "share of it reached"]
    assert gain["name"].endswith("144 visual tokens")
    assert reached["value"] == pytest.approx(gain["value"] / allowed["value"])
    assert (reached["at_least"], reached["at_best"]) == (0.9, 1)
    assert 1 < allowed["value"] < 2  # half of the tokens from layer 2 of 6 on
    by_layers = figures["prefill", "speed-up that single layers allow"]
    share = figures["prefill", "share of that reached"]
    assert share["value"] == pytest.approx(gain["value"] / by_layers["value"])
    text = next(rate for name, rate in figures.items() if name[1].startswith("rate of a decoder"))
    assert text["unit"] == "GFLOP/s"
    assert figures["machinery", "processor time at ratio 0 over plain"]["at_most"] == 1.01
    sizes = {
        figure["name"]: figure["value"]
        for figure in result["figures"]
        if figure["part"] == "memory"
    }
    gone = sizes["cache after prefill, full"] - sizes["cache after prefill, reduced"]
    # Keys and values of 6 heads of 32 in fp32: half of the tokens, in 4 of 6 layers.
    assert gone * 2**20 == pytest.approx(72 * 4 * 2 * 6 * 32 * 4)
    page = (tmp_path / "bench_engine.md").read_text()
    assert all(figure["name"] in page for figure in result["figures"])
    assert result["conditions"]["device_name"] in page


# ------------------------------------------------------------------ the prefill against its bounds


def test_above_the_bound_beyond_the_interval_is_not_believable() -> None:
    share = Figure("prefill", "share", 1.2, "x", interval=(1.09, 1.32), at_least=0.9, at_best=1)
    assert (share.verdict, share.met) == ("not believable", False)
    assert replace(share, interval=(0.99, 1.5)).verdict == "met"
    assert replace(share, value=0.8, interval=(0.7, 0.95)).verdict == "missed"
    assert replace(share, interval=None, quartiles=(1.1, 1.3)).verdict == "not believable"
    assert replace(share, at_best=None).verdict == "met"
    assert Figure("memory", "bytes", 2.0, "MiB").verdict == ""


def test_rounds_turn_and_the_first_is_not_counted() -> None:
    calls: list[str] = []

    def ask(name: str) -> Callable[[], float]:
        return lambda: float(len(calls.append(name) or calls))  # type: ignore[func-returns-value]

    seconds = bench_prefill.in_rounds({name: ask(name) for name in "abc"}, 3)
    assert "".join(calls) == "abc" + "cba" + "abc" + "cba"
    assert seconds == {"a": [6, 7, 12], "b": [5, 8, 11], "c": [4, 9, 10]}


def test_a_gain_above_the_flops_is_explained_by_what_single_layers_cost() -> None:
    """Long layers cost twenty times a short one, their FLOPs say less: four take 40, two of each 21."""
    record = SampleRecord("s", 90, 10, (), (), (90, 90, 0, 0), 0, 0, 1, times_ms={"select": 0.5})
    counted = sample_flops(Setup().spec().model.facts, record.entering, 90, 10, Work())
    times = {
        "full": [41.0, 40.0, 39.0],
        "short": [21.0, 21.0, 21.0],
        100: [10.0] * 3,
        10: [0.5] * 3,
    }
    names = {
        figure.name.partition(",")[0]: figure
        for figure in bench_prefill.compared("short", record, counted, times)
    }
    allowed = names["speed-up that FLOPs allow"].value
    assert 1 < allowed < 40 / 21
    assert names["share of it reached"].value == pytest.approx(40 / 21 / allowed, rel=1e-3)
    assert names["speed-up that single layers allow"].value == pytest.approx(40 / 21)
    layers = names["share of that reached"]
    assert layers.value == pytest.approx(1, rel=1e-3)
    assert layers.interval[0] < 1 < layers.interval[1]
    assert layers.verdict == "met"
    doubted = replace(names["share of it reached"], interval=(1.01, 1.1), value=1.05)
    assert bench_engine._looked_at([layers]) == []
    assert doubted.name in bench_engine._looked_at([layers, doubted])[0]
