"""Sweeps with cells that cannot run: left out and said so, or refused as a whole; and the report of what ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.evaluation.evaluate import SampleErrors
from espalier.harness.evaluation.samples import Failure
from espalier.harness.runs import admission
from espalier.harness.specs.run_spec import RunSpec
from tests.runs.helpers import Bench, Fake

#: FastV acts before layer 2 of 6, so that its mean over the layers stays above a third.
SWEEP = ("-m", "method=random,fastv", "ratio=0.5,0.9", "budget=average")
REASON = "ratio=0.9 cannot be met under budget=average: FastV acting before layer 2"


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of the report."""
    calls: list[dict[str, Any]] = []

    def write(spec: RunSpec, keys: set[str], left_out: list[tuple[RunSpec, str]]) -> Iterator[Path]:
        cells = [(cell.method.name, cell.budget.ratio, reason) for cell, reason in left_out]
        calls.append({"folder": spec.report, "keys": keys, "left_out": cells})
        yield spec.report / "README.md"

    monkeypatch.setattr("espalier.harness.reports.curves.method_report.write_report", write)
    return calls


@pytest.mark.parametrize(
    "line", [SWEEP, ("-m", "method=fastv", "ratio=0.9", "budget=average", "refused=skip")]
)
def test_a_cell_that_cannot_run_stops_the_sweep_unless_others_may_go_on(
    bench: Bench, line: tuple[str, ...]
) -> None:
    done = bench(*line)
    assert (done.code, done.out, bench.fake.specs) == (2, "", [])
    assert REASON in done.err


def test_cells_that_cannot_run_are_left_out_and_said_so(
    bench: Bench, reported: list[dict[str, Any]], tmp_path: Path
) -> None:
    done = bench.success(*SWEEP, "refused=skip", f"report={tmp_path / 'report'}")
    cells = [(row["method"], row["ratio"]) for row in done.rows]
    assert cells == [("random", 0.5), ("random", 0.9), ("fastv", 0.5)]
    *_, note, wrote, last = done.out.splitlines()
    assert note.startswith(f"left out: fastv official 0.9 seedling_rec: {REASON}")
    assert wrote == f"wrote {tmp_path / 'report' / 'README.md'}"
    assert last.startswith("{")
    (call,) = reported
    assert call["folder"] == tmp_path / "report"
    assert call["keys"] == {row["run_key"] for row in done.rows}
    ((name, ratio, reason),) = call["left_out"]
    assert (name, ratio) == ("fastv", 0.9)
    assert reason.startswith(REASON)


def test_a_schedule_fitted_to_the_model_is_no_part_of_a_rows_name(bench: Bench) -> None:
    done = bench.success("method=fitprune", "ratio=0.5")
    assert done.last["extra"]["params"]["scheme"]
    assert done.last["extra"]["label"] == ""


def test_what_is_wrong_for_every_method_is_never_left_out(bench: Bench) -> None:
    done = bench(*SWEEP, "refused=skip", "model.path=/nowhere")
    assert done.code == 2
    assert "model.path='/nowhere' holds no model" in done.err
    assert bench("-m", "method=fastv,fastw", "refused=skip").code == 2


def test_a_second_sweep_runs_nothing_again(bench: Bench, reported: list[dict[str, Any]]) -> None:
    again = (*SWEEP, "refused=skip", f"report={bench.store}")
    first = bench(*again)
    runs = len(bench.fake.specs)
    second = bench(*again)
    assert len(bench.fake.specs) == runs == 3
    assert {row["status"] for row in second.rows} == {"cached"}
    assert reported[0] == reported[1]
    assert first.code == second.code == 0


def test_a_cell_that_fails_is_in_the_report_with_its_reason(
    bench: Bench, reported: list[dict[str, Any]]
) -> None:
    failed = SampleErrors((Failure("seedling_rec", 1, "ValueError: broken\nimage"),), 3)
    bench.fake.stop_after, bench.fake.error = 1, lambda: failed
    done = bench("-m", "method=random,fastv", "ratio=0.5", f"report={bench.store}")
    assert done.code == 1
    assert [row["method"] for row in done.rows] == ["fastv"]
    ((name, _, reason),) = reported[0]["left_out"]
    assert name == "random"
    assert "ValueError: broken image" in reason


def test_a_mistake_of_the_code_shows_when_the_other_cells_have_run(bench: Bench) -> None:
    bench.fake.stop_after, bench.fake.error = 1, lambda: ZeroDivisionError("nobody thought of it")
    with pytest.raises(ZeroDivisionError, match="nobody thought of it"):
        bench("-m", "method=random,fastv,none", "ratio=0.5")
    out = bench.capsys.readouterr().out
    assert [json.loads(line)["method"] for line in out.splitlines() if line[0] == "{"] == [
        "fastv",
        "none",
    ]
    again = out.partition("run what failed again: ")[2].splitlines()[0]
    assert again.endswith("method=random ratio=0.5")
    assert "failed: random 0.5 seedling_rec: ZeroDivisionError: nobody thought of it" in out


@pytest.mark.slow
def test_an_interrupted_sweep_leaves_the_last_report_alone(
    bench: Bench, reported: list[dict[str, Any]]
) -> None:
    fake: Fake = bench.fake
    bench("method=random", "ratio=0.5")
    fake.stop_after = 1
    sweep = ("-m", "method=random,fastv", "ratio=0.5", f"report={bench.store}")
    assert bench(*sweep).code == 130
    assert reported == []
    assert bench(*sweep).code == 0
    assert len(reported) == 1


def test_each_cell_is_checked_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, float]] = []
    admit = admission.admit

    def counted(spec: RunSpec, *arguments: Any) -> admission.Job:
        checked.append((spec.method.name, spec.budget.ratio))
        return admit(spec, *arguments)

    monkeypatch.setattr(admission, "admit", counted)
    done = bench.success("-m", "method=random,uniform", "ratio=0.5,0.75")
    assert checked == [(row["method"], row["ratio"]) for row in done.rows]
    assert len(checked) == 4
