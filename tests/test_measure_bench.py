"""The benchmark script: pairing, targets, the selection part on tiny sizes, and its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.errors import UserError
from harness.measure import bench, bench_engine, bench_selection
from harness.measure.bench_setup import Figure, Pair, Setup, paired
from methods.base import SIGNALS, Need, Site


def test_pairs_run_in_turns_with_the_order_changing() -> None:
    calls: list[str] = []
    pair = paired(lambda: calls.append("a"), lambda: calls.append("b"), repeats=4)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert len(pair.first) == len(pair.second) == 4
    assert min(pair.first + pair.second) > 0


def test_the_ratio_is_the_median_over_pairs_and_not_of_medians() -> None:
    pair = Pair((1.0, 10.0, 3.0), (1.0, 5.0, 1.0))
    assert pair.ratios == (1, 2, 3)
    figure = pair.figure("machinery", "x", at_most=1.5)
    assert (figure.value, figure.quartiles) == (2, (1.5, 2.5))
    assert figure.met is False


def test_targets_are_upper_or_lower() -> None:
    assert Figure("p", "n", 2.0, "x", at_least=2).met is True
    assert Figure("p", "n", 1.9, "x", at_least=2).met is False
    assert Figure("p", "n", 1.02, "x", at_most=1.02).met is True
    assert Figure("p", "n", 1.0, "x").met is None


def test_parts_are_chosen_by_name_in_their_own_order() -> None:
    assert bench.choose(None) == tuple(bench.PARTS)
    assert bench.choose("samples, machinery") == ("machinery", "samples")
    with pytest.raises(UserError, match=r"--only='memroy'.*did you mean memory.*batching"):
        bench.choose("memroy")


def test_bad_input_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--only", "nothing"]) == 2
    assert bench.main(["--model", "nothing", "--only", "selection"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert "model='nothing'" in errors[1]


def test_views_carry_every_signal_in_its_shape() -> None:
    tokens = bench_selection.features(16, 96)
    needs = tuple(Need(name) for name in SIGNALS)
    view = bench_selection.view_of(tokens, Site("prefix"), needs)
    assert set(view.signals) == set(SIGNALS)
    for need in needs:
        axes = SIGNALS[need.signal].partition(")")[0].strip("(").split(", ")
        shape = dict(zip(axes, view.signals[need.key].shape, strict=True))
        assert shape["B"] == 1
        assert shape.get("N", 16) == 16
    assert view.grid[0, :, 2:].tolist() == [[i // 4, i % 4] for i in range(16)]
    assert torch.equal(tokens, bench_selection.features(16, 96))


def test_selection_times_methods_and_leaves_out_those_without_sites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_selection, "SIZES", ((36, 96),))
    monkeypatch.setattr(bench_selection, "configured_methods", lambda: ["none", "divprune"])
    threads = torch.get_num_threads()
    figures = bench_selection.selection(Setup(quick=True))
    assert torch.get_num_threads() == threads
    assert [figure.name for figure in figures] == [
        "the product itself, N=36 d=96",
        "divprune, N=36 d=96 keep=4",
    ]
    assert all(figure.value > 0 for figure in figures)


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


def test_the_engine_bench_holds_measured_against_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the embedded model the figures mean little, but every part runs and the pages say what was measured."""
    arguments = ["model=seedling", "--repeats", "2", "--ratio", "0.5", "--write", str(tmp_path)]
    assert bench_engine.main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "bench_engine.json").read_text()) == result
    figures = {(one["part"], one["name"].partition(",")[0]): one for one in result["figures"]}
    gain = figures["prefill", "speed-up"]
    allowed = figures["prefill", "speed-up that FLOPs allow"]
    reached = figures["prefill", "share reached"]
    assert gain["name"].endswith("144 visual tokens")
    assert reached["value"] == pytest.approx(gain["value"] / allowed["value"])
    assert 1 < allowed["value"] < 2  # half of the tokens from layer 2 of 6 on
    assert figures["machinery", "processor time at ratio 0 over plain"]["at_most"] == 1.01
    assert figures["memory", "cache after prefill"]["value"] > 0
    page = (tmp_path / "bench_engine.md").read_text()
    assert all(one["name"] in page for one in result["figures"])
    assert result["conditions"]["device_name"] in page


def test_a_bad_instance_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_engine.main(["model=nothing"]) == 2
    assert "model='nothing'" in capsys.readouterr().err
