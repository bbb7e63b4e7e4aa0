"""The simulation of coverage: its journal, and cells in which counting both unseen samples at either end missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench import interval_coverage as coverage
from lab.bench.populations import POPULATIONS, Population


def of(name: str) -> Population:
    return next(population for population in POPULATIONS if population.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n", "loss"),
    [
        ("all 1, parts lost", 100, 0.002),  # 0.879 of means before
        ("words, whole pages lost", 100, 0.05),  # 0.901 of means, 0.923 of retention before
    ],
)
def test_intervals_cover_where_a_loss_is_rare_or_long(name: str, n: int, loss: float) -> None:
    cells = {cell["interval"]: cell for cell in coverage.simulated(of(name), n, loss, 400)}
    # Of 400 draws at a coverage of 0.95 fewer than 0.918 hold the truth one time in a thousand.
    assert {interval for interval, cell in cells.items() if cell["coverage"] < 0.918} == set()
    assert cells["retention"]["bootstrap_coverage"] < 0.9


def test_a_journal_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "SIZES", (30,))
    monkeypatch.setattr(coverage, "LOSSES", (0.0, 0.05))
    monkeypatch.setattr(coverage, "POPULATIONS", POPULATIONS[:2])
    monkeypatch.setattr(coverage, "BENCHMARKS", (3,))
    monkeypatch.setattr(coverage, "averages", lambda count, n, loss, runs: averaged(count, n, loss))
    journal = tmp_path / "journal.jsonl"
    whole = list(coverage.grid(5, journal))
    lines = journal.read_text().splitlines()
    assert len(lines) == 6
    # A process that was killed while it wrote the third line.
    journal.write_text("\n".join([*lines[:2], lines[2][:40]]) + "\n")
    assert list(coverage.grid(5, journal)) == whole
    assert len(journal.read_text().splitlines()) == 7
    # Other draws are other cells.
    assert coverage.read_journal(journal, 6) == {}


def averaged(count: int, n: int, loss: float) -> coverage.Cell:
    place = ("average", coverage.average_name(count), n, loss, "average retention")
    return dict(zip(coverage.COLUMNS, (*place, 1.0, 0.1, None, None), strict=True))
