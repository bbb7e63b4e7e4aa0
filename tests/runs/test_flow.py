"""run.py from command line to stored row: the contract of the last line, skipping, resuming, sweeps, interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from espalier.harness.cost.memory import Peak
from espalier.harness.evaluation.samples import Failure, SampleErrors
from espalier.harness.store import Store
from tests.runs.helpers import Bench

NUMBER = (int, float)
CONTRACT: dict[str, Any] = {
    "schema": int,
    "status": str,
    "run_key": str,
    "model": str,
    "method": str,
    "variant": str,
    "benchmark": str,
    "ratio": float,
    "budget_rule": str,
    "seed": int,
    "n_samples": int,
    "metrics": dict,
    "tokens": dict.fromkeys(
        ("visual", "requested_keep", "kept_final", "layer_average", "kv_entries"), NUMBER
    ),
    "flops": {
        **dict.fromkeys(("prefill_exact", "prefill_paper", "share_of_full"), NUMBER),
        **dict.fromkeys(("paper", "paper_full"), dict),
    },
    "time": dict.fromkeys(("vision_ms", "select_ms", "prefill_ms", "decode_ms_per_token"), NUMBER),
    "memory": dict.fromkeys(("kv_bytes", "peak_bytes"), NUMBER),
    "settings": dict.fromkeys(("model", "method", "benchmark", "engine"), dict),
    "extra": dict,
}


def assert_contract(row: dict[str, Any], contract: dict[str, Any]) -> None:
    for key, kind in contract.items():
        if isinstance(kind, dict):
            assert_contract(row[key], kind)
        else:
            assert isinstance(row[key], kind), key


def test_last_line_is_the_stored_row_of_the_contract(bench: Bench) -> None:
    done = bench.success("method=fastv", "ratio=0.75")
    assert "noise" not in done.out
    assert "noise" in done.err
    table, last = done.out.rsplit("\n", 2)[:2]
    assert "0.500 ± 0.100" in table
    assert last.startswith("{")
    row = done.last
    run = Store(bench.store).run(row["run_key"])
    assert run.row() == row
    assert json.loads((run.path / "spec.json").read_text())["cell"]["method"] == "fastv"
    assert_contract(row, CONTRACT)
    assert (row["schema"], row["status"], row["n_samples"]) == (4, "done", 3)
    assert (row["method"], row["ratio"], row["budget_rule"]) == ("fastv", 0.75, "kept")
    assert row["tokens"]["visual"] == 144
    assert row["tokens"]["requested_keep"] == row["tokens"]["kept_final"] == 36
    assert row["tokens"]["layer_average"] == (2 * 144 + 4 * 36) / 6
    assert row["metrics"]["acc_at_50"] == {"value": 0.5, "stderr": 0.1}
    assert 0 < row["flops"]["share_of_full"] < 1
    assert row["extra"]["sites"] == [{"where": "layer", "layer": 2, "requested": 36, "kept": 36}]
    assert row["extra"]["headline"] == "acc_at_50"
    environment = row["extra"]["environment"]
    assert {"torch", "device", "dtype", "attention", "threads", "commit"} <= set(environment)
    assert environment["cards"] == []
    assert environment["weights_gib"].keys() == {"cpu"}
    assert environment["weights_gib"]["cpu"] > 0
    assert row["extra"]["batch_size"] == environment["batch_size"]
    assert environment["processes"] == 1


def test_finished_key_is_not_run_again_unless_forced(bench: Bench) -> None:
    first = bench("method=fastv")
    again = bench("method=fastv")
    assert len(bench.fake.specs) == 1
    assert again.last == first.last | {"status": "cached"}
    forced = bench("method=fastv", "force=true")
    assert len(bench.fake.specs) == 2
    assert forced.last["status"] == "done"
    assert forced.last["run_key"] == first.last["run_key"]


def test_interrupted_run_keeps_its_journal_and_goes_on(bench: Bench) -> None:
    bench.fake.stop_after = 2
    stopped = bench("method=fastv")
    assert stopped.code == 130
    assert stopped.out == ""
    assert len(stopped.err.splitlines()) == 1
    resumed = bench("method=fastv")
    assert resumed.code == 0
    assert resumed.last["status"] == "resumed"
    assert resumed.last["extra"]["resumed_samples"] == 2
    assert len(Store(bench.store).run(resumed.last["run_key"]).journal) == 3


def test_failed_sample_is_named_and_the_other_cells_still_run(bench: Bench) -> None:
    bench.fake.stop_after = 1
    failure = Failure("seedling_rec", 1, "ValueError: broken image")
    bench.fake.error = lambda: SampleErrors([failure], 3)
    done = bench("-m", "method=fastv", "ratio=0.5,0.9")
    assert done.code == 1
    assert (
        len(done.err.splitlines()) == 2
    )  # one line for the failure, one of noise from the cell that ran
    assert "seedling_rec/1: ValueError: broken image" in done.err
    assert [row["ratio"] for row in done.rows] == [0.9]
    assert done.out.splitlines()[-1].startswith("{")


def test_sweep_loads_each_model_once_and_ends_with_the_last_cell(bench: Bench) -> None:
    done = bench.success("-m", "method=none,fastv", "ratio=0.5,0.9")
    assert bench.fake.loads == 1
    cells = [(row["method"], row["ratio"], row["status"]) for row in done.rows]
    # A method that removes nothing has one row, whatever the ratio.
    assert cells == [
        ("none", 0.0, "done"),
        ("none", 0.0, "cached"),
        ("fastv", 0.5, "done"),
        ("fastv", 0.9, "done"),
    ]
    assert done.last == done.rows[-1]
    assert len(Store(bench.store).rows()) == 3
    assert {row["extra"]["speedup"] for row in done.rows} == {None}
    table = done.out.splitlines()[-8:-1]
    assert sum(line.startswith("seedling_rec") for line in table) == 3  # none once
    both = bench("-m", "method=none,divprune", "model=seedling,seedling_draft", "ratio=0.5")
    assert (both.code, bench.fake.loads) == (0, 3), both.err
    assert [row["model"] for row in both.rows] == ["seedling"] * 2 + ["seedling_draft"] * 2


def test_the_peak_is_that_of_all_devices_of_the_model_until_the_run_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, ...]] = []

    @contextmanager
    def peak_memory(*devices: Any) -> Iterator[Peak]:
        measured.append(tuple(map(str, devices)))
        peak = Peak(note="of both", _read=lambda: 70 if bench.fake.over else 90)
        yield peak
        peak.stop()

    monkeypatch.setattr("espalier.harness.cost.memory.peak_memory", peak_memory)
    bench.fake.devices = ("cuda:0", "cuda:1")
    row = bench("method=fastv").last
    assert measured == [("cuda:0", "cuda:1")]
    assert row["memory"]["peak_bytes"] == 70
    assert not bench.fake.over  # what was measured afterwards did not count


SPEEDUP = {
    "pairs": 4,
    "prefill": {"ratio": 2.5, "low": 2.4, "high": 2.6, "bound": 3.0, "above_bound": False},
    "above_bound": False,
}


def test_force_in_a_sweep_runs_each_key_once(bench: Bench) -> None:
    bench("method=none")
    done = bench("-m", "method=none", "ratio=0.5,0.9", "force=true")
    assert [row["status"] for row in done.rows] == ["done", "cached"]
    assert len(bench.fake.specs) == 2


@pytest.mark.slow
def test_a_stored_row_gets_the_speed_up_that_it_lacks_without_new_answers(bench: Bench) -> None:
    before = bench("method=fastv", "engine.paired=0").last
    assert bench("method=fastv").last["status"] == "cached"  # auto asks for nothing by name
    bench.fake.speedup = SPEEDUP
    after = bench("method=fastv", "engine.paired=8").last
    assert after["run_key"] == before["run_key"]
    assert (after["status"], after["extra"]["resumed_samples"]) == ("resumed", 3)
    assert after["extra"]["speedup"] == SPEEDUP
    assert bench("method=fastv", "engine.paired=8").last["status"] == "cached"
    assert len(bench.fake.specs) == 2


@pytest.mark.parametrize("settings", ["method=none", "method=fastv engine=emulate"])
def test_what_can_have_no_speed_up_is_not_asked_again(bench: Bench, settings: str) -> None:
    bench(*settings.split())
    assert bench(*settings.split(), "engine.paired=8").last["status"] == "cached"


def test_curves_of_all_rows_are_drawn_before_the_last_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bench.store / "curve"
    write = Mock(return_value=(target.with_suffix(".png"),))
    monkeypatch.setattr("espalier.harness.reports.curves.curve_files.write_curves", write)
    done = bench.success("-m", "method=none,fastv", "ratio=0.5", f"curves={target}")
    keys = {row["run_key"] for row in done.rows}
    write.assert_called_once_with(bench.store, target, run_keys=keys)
    assert done.out.splitlines()[-2] == f"wrote {target}.png"
    assert done.last == done.rows[-1]


def test_a_sweep_leaves_nothing_but_its_list_and_its_runs(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench("method=none")
    assert {path.name for path in bench.store.iterdir()} == {"cells", "runs"}
    bench("-m", "method=none")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert {path.name for path in bench.store.iterdir()} == {"cells", "runs", "sweeps"}
