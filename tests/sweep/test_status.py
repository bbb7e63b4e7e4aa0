"""The status of a sweep, read from a store that other processes write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cli import sweep as command
from espalier.harness.cli.sweep import main
from espalier.harness.errors import UserError
from espalier.harness.runs.hints import commands, products
from espalier.harness.runs.sweep_progress import progress_of
from espalier.harness.store import RunDir, Store
from espalier.harness.store.sweep_files import SweepCell, announce, find
from tests.refused import refused
from tests.store import test_upkeep as upkeep
from tests.store.test_upkeep import add

ARGV = ("-m", "+experiment=quick", "method=fastv,none", "ratio=0.5,0.9")


def cell(key: str, method: str, ratio: float, samples: int | None = 4) -> SweepCell:
    line = ("benchmark=b", f"method={method}", f"ratio={ratio:g}")
    return SweepCell(key, "m", method, "b", ratio, "", samples, line)


CELLS = (cell("aa", "fastv", 0.5), cell("bb", "fastv", 0.9), cell("cc", "none", 0.5))
OTHERS = (cell("dd", "none", 0.9), cell("ee", "none", 0.95))


def answer(run: RunDir, number: int, right: bool) -> None:
    target = {"target": "yes" if right else "no"}
    run.journal.append({"task": "t", "doc_id": number, "answer": "yes", "asked": target})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A sweep of five cells: done, running, failed, begun and killed, not begun."""
    root = tmp_path / "store"
    announce(root, ARGV, [*CELLS, *OTHERS])
    add(root, "aa", [1, 0, 1, 1])
    failed = Store(root).run("cc")
    (failed.path / "failed.json").write_text(json.dumps({"cause": "CUDA out of memory"}))
    answer(Store(root).run("dd"), 0, True)
    return root


def run_cli(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, list[str], list[str]]:
    return upkeep.run_cli(capsys, *argv, main=main)


def test_status_counts_names_and_advises(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Store(store).run("bb")
    with run.claim(0) as claimed:
        assert claimed
        run.describe({})
        for number in range(3):
            answer(run, number, number == 0)
        code, out, err = run_cli(capsys, "status", "--store", store)
    assert (code, err) == (0, [])
    name = next((store / "sweeps").glob("*.json")).stem
    assert out[0] == f"sweep {name}: run.py {' '.join(ARGV)}"
    assert re.match("5 cells: 1 done, 1 running, 1 failed, 2 left; .* left$", out[1])
    assert out[3].startswith("running  m fastv 0.9 b  3/4  match 0.333  ")
    assert [out[2], *out[4:]] == [
        "done  m fastv 0.5 b  n=4  acc 0.750",
        "failed  m none 0.5 b  CUDA out of memory",
        "left  m none 0.9 b  1/4  match 1.000",
        "left  m none 0.95 b",
        "again: python run.py benchmark=b method=none ratio=0.5",
    ]
    # The owner is gone: nothing runs, so the remaining time is unknown.
    _, out, _ = run_cli(capsys, "status", "--store", store)
    assert out[1] == "5 cells: 1 done, 0 running, 1 failed, 3 left"


def test_the_time_left_follows_from_samples_and_speed(store: Path) -> None:
    sweep = find(store, None)
    run = Store(store).run("bb")
    with run.claim(0):
        run.describe({})
        answer(run, 0, True)
        progress = progress_of(store, sweep)
    # 3 of the running cell, 3 of the killed one, 4 of the one that has not begun.
    assert progress.seconds == pytest.approx(10 / progress.rate)
    assert progress.total(cell("ee", "none", 0.95, samples=None)) is None


def test_a_sweep_is_found_by_id_and_preset_and_its_file_is_written_once(store: Path) -> None:
    path = announce(store, ARGV, [*CELLS, *OTHERS])
    written = path.read_bytes()
    later = announce(store, ("-m", "method=none"), OTHERS)
    assert announce(store, ARGV, [*CELLS, *OTHERS]) == path
    assert path.read_bytes() == written
    assert path != later
    for name in (path.stem[:5], str(path), "quick"):
        sweep = find(store, name)
        assert (sweep.name, sweep.cells) == (path.stem, (*CELLS, *OTHERS))
    with pytest.raises(UserError, match=f"sweep='other' is none of 2 .*valid: .*{path.stem}"):
        find(store, "other")
    path.write_text('{"version": 2}')
    assert "is of version 2; this version reads 1; valid: " in refused(find, store, path.stem)


def test_without_a_sweep_the_whole_store_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path, "aa", [1])
    code, out, _ = run_cli(capsys, "status", "--store", tmp_path)
    assert (code, out) == (
        0,
        ["1 cells: 1 done, 0 running, 0 failed, 0 left", "done  m fastv 0.5 b  n=1  acc 1.000"],
    )
    for argv, word in (
        (("status", "--store", tmp_path / "none"), "is not a store"),
        (("status", "x", "--store", tmp_path), "sweep='x' is none of 0"),
        (("status", "--every", "0", "--store", tmp_path), "--every=0 must be above 0"),
    ):
        code, _, (line,) = run_cli(capsys, *argv)
        assert code == 2
        assert word in line


def test_watching_ends_when_nothing_is_left(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[Any] = []

    def look(*place: Any) -> Any:
        looks.append(1)
        if len(looks) == 3:
            for key in ("bb", "cc", "dd", "ee"):
                add(store, key, [1, 1, 1, 1])
        return progress_of(*place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "progress_of", look)
        code, out, _ = run_cli(capsys, "status", "--watch", "--every", "0.01", "--store", store)
    assert code == 0
    assert out[:2] == [
        "5 cells: 1 done, 0 running, 1 failed, 3 left",
        "5 cells: 5 done, 0 running, 0 failed, 0 left",
    ]
    assert len(looks) == 3


def test_commands_have_the_failed_cells_and_no_others() -> None:
    assert commands([]) == []
    pair = [cell("a", "fastv", 0.5), cell("b", "fastv", 0.9)]
    assert commands(pair) == ["python run.py -m benchmark=b method=fastv ratio=0.5,0.9"]
    square = [*pair, cell("c", "none", 0.5), cell("d", "none", 0.9)]
    (line,) = commands(square)
    assert line == "python run.py -m benchmark=b method=fastv,none ratio=0.5,0.9"
    # Three corners of a square are two commands: one with all four would run a cell too many.
    assert len(commands(square[:3])) == 2


def test_only_what_was_put_together_asks_for_a_sweep() -> None:
    table = "method.params={a: 1, b: 2}"
    assert products([("method=fastv", table)]) == [("method=fastv", table)]
    pair = [("method=fastv", "ratio=0.5", table), ("method=fastv", "ratio=0.9", table)]
    assert products(pair) == [("-m", "method=fastv", "ratio=0.5,0.9", table)]
    # One of them has a key that the other lacks.
    assert products([("method=fastv",), ("method=fastv", "ratio=0.5")]) == [
        ("method=fastv",),
        ("method=fastv", "ratio=0.5"),
    ]
