"""A store of run key version 4, whose rows are read, listed and drawn; a run with their settings reports them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from espalier.harness.cli.curves import main as draw
from espalier.harness.cli.store import main as look
from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.reports import results
from espalier.harness.runs.admission import admit
from espalier.harness.specs.comparable import check_comparable, settings_digest
from espalier.harness.store import Store
from espalier.harness.store.files.digests import Digests
from tests.runs.helpers import Bench, make_bench

OLDER = Path(__file__).with_name("older_store")

#: Runs of the store: a reducer, a decoder, a reducer with a compressor, and a method of a user.
METHODS = {"fastv", "pearl", "fastv+h2o", "Longest"}

SETTINGS = ("benchmark=seedling_rec", "ratio=0.5", "limit=2", "engine.batch_size=2")


@pytest.fixture
def bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    shutil.copytree(OLDER, tmp_path / "store")
    return make_bench(tmp_path / "store", capsys, monkeypatch)


@pytest.mark.slow
def test_its_rows_are_read_listed_and_exported(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ("--store", str(bench.store))
    assert {row["method"] for row in Store(bench.store).rows()} == METHODS
    assert set(results.load(bench.store).method) == METHODS
    assert look(["ls", *store]) == 0
    out, err = capsys.readouterr()
    assert all(method in out for method in METHODS)
    assert "4 done" in err
    assert look(["verify", *store]) == 0
    assert look(["export", str(tmp_path / "tables"), *store]) == 0
    assert set(results.load(tmp_path / "tables").method) == METHODS
    assert draw(["--out", str(tmp_path / "curve"), *store]) == 0
    assert {method for method in METHODS if method in (tmp_path / "curve.md").read_text()}


@pytest.mark.parametrize(
    ("method", "argv"),
    [
        ("fastv", ("method=fastv",)),
        ("pearl", ("method=pearl", "engine.transport=sequential")),
        ("fastv+h2o", ("method=fastv", "compressor=h2o")),
        ("Longest", (f"method={OLDER / 'mine.py'}:Longest",)),
    ],
)
def test_its_rows_have_the_settings_of_today(method: str, argv: tuple[str, ...]) -> None:
    (row,) = (row for row in Store(OLDER).rows() if row["method"] == method)
    command = read_command([*argv, *SETTINGS])
    job = admit(build_spec(command.cells[0]), Digests(), places=False)
    assert settings_digest(job.parts["settings"]) == settings_digest(row["settings"])
    assert job.key != row["run_key"]


@pytest.mark.parametrize("method", ["fastv", f"{OLDER / 'mine.py'}:Longest"])
def test_a_run_of_its_settings_names_the_row_that_it_replaces(bench: Bench, method: str) -> None:
    argv = (f"method={method}",)
    done = bench.success(*argv, *SETTINGS)
    row, rows = done.last, Store(bench.store).rows()
    (older,) = (
        each["run_key"]
        for each in rows
        if each["method"] == row["method"] and each["run_key"] != row["run_key"]
    )
    line = f"run {older} has these settings, but is of other code or packages (commit 99b77d96c57a)"
    assert line in done.err
    assert row["status"] == "done"
    check_comparable(rows)
    assert older not in set(results.load(bench.store).run_key)
    # Once more the new row is the run's.
    again = bench(*argv, *SETTINGS)
    assert again.last["status"] == "cached"
    assert "these settings" not in again.err
