"""Paths of a store that are not files, or hold anything: every overview reports them and continues."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cli.sweep import main as sweep_command
from espalier.harness.store import Store
from espalier.harness.store.files.lease import read_lease
from espalier.harness.store.sweep_files import SweepCell, announce, find
from tests.store.test_upkeep import add, run_cli

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


def damaged(how: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a damage that puts something else in the place of a file."""

    def write(path: Path) -> None:
        path.unlink(missing_ok=True)
        how(path)

    return write


def holds(content: bytes) -> Callable[[Path], None]:
    return damaged(lambda path: path.write_bytes(content))


def changed(**more: Any) -> Callable[[Path], None]:
    """Return a damage that changes entries of a row; a value that is a table is put over the one there."""

    def write(path: Path) -> None:
        row = json.loads(path.read_bytes())
        for name, value in more.items():
            row[name] = {**row[name], **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")

    return write


FILES: dict[str, Callable[[Path], None]] = {
    "link": damaged(lambda path: path.symlink_to(path.name)),
    "folder": damaged(Path.mkdir),
    "pipe": damaged(os.mkfifo),
    "empty": holds(b""),
    "binary": holds(bytes(range(256))),
    "utf-16": holds("{}".encode("utf-16")),
    "deep": holds(DEEP.encode()),
    "null": holds(b"null"),
    "list": holds(b"[1, 2]"),
    "number": holds(b"1e999"),
}
ROWS: dict[str, Callable[[Path], None]] = {
    **FILES,
    "nan": changed(metrics={"acc": {"value": float("nan"), "stderr": None}}),
    "infinite": changed(time={"prefill_ms": float("inf")}),
    "samples": changed(n_samples=-3),
    "flag": changed(n_samples=True),
    "metrics": changed(metrics={"acc": 5}),
    "value": changed(metrics={"acc": {"value": "high", "stderr": None}}),
    "headline": changed(extra={"headline": ["acc"]}),
    "label": changed(extra={"label": 5}),
    "environment": changed(extra={"environment": "here"}),
    "aggregation": changed(extra={"aggregation": {"acc": "mean"}}),
    "settings": changed(settings=[]),
    "ratio": changed(ratio=float("nan")),
}
READERS = (("ls",), ("verify", "--dry"), ("gc",), ("gc", "--keep-code", "c1"), ("export", "OUT"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    for key in ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"):
        add(root, key, [1, 0])
    return root


def overview(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what each reader printed; none of them may raise or be without the whole run."""
    printed = {}
    for command in READERS:
        line = [part.replace("OUT", str(tmp_path / "tables")) for part in command]
        code, out, err = run_cli(capsys, *line, "--store", store)
        assert code in (0, 1), (command, err)
        printed[" ".join(command)] = "\n".join(out + err)
    assert sweep_command(["status", "--store", str(store)]) == 0
    assert "bbbbbbbbbbbbbbbb" in printed["ls"]
    assert re.search(r": [1-9] rows", printed["export OUT"])
    return printed


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ROWS)
def test_a_row_that_is_none_is_named(
    damage: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ROWS[damage](store / "runs" / "aaaaaaaaaaaaaaaa" / "row.json")
    printed = overview(store, tmp_path, capsys)
    for reader in ("ls", "verify --dry", "export OUT"):
        # errors are told once a process, so that of the export may have been told before
        assert "aaaaaaaaaaaaaaaa" in printed[reader] or reader == "export OUT"
    assert "damaged" in printed["ls"]
    assert [row["run_key"] for row in Store(store).rows()] == ["bbbbbbbbbbbbbbbb"]


def test_a_row_of_a_gigabyte_is_not_read(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store / "runs" / ("a" * 16) / "row.json"
    with path.open("r+b") as file:
        file.truncate(2**40)  # more than any memory; it takes no room
    printed = overview(store, tmp_path, capsys)
    assert "it has more than 64 MiB" in printed["ls"]
    assert "a" * 16 in printed["verify --dry"]


@pytest.mark.sampled
@pytest.mark.parametrize("damage", FILES)
def test_other_files_that_are_none_stop_nobody(
    damage: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind of file in a finished run, and in one without a row."""
    names = ("journal.jsonl", "lease", "failed.json", "spec.json", "lock")
    for number, name in enumerate(names):
        add(store, f"{number}" * 16, [1, 0])
        for key in (f"{number}" * 16, f"c{number}" * 8):
            path = Store(store).run(key).path / name
            path.unlink(missing_ok=True)
            FILES[damage](path)
    overview(store, tmp_path, capsys)


@pytest.mark.parametrize("damage", FILES)
def test_a_sweep_that_is_none_is_passed_over(damage: str, store: Path) -> None:
    cell = SweepCell("aaaaaaaaaaaaaaaa", "m", "fastv", "b", 0.5, "", None, ("method=fastv",))
    announce(store, ["+experiment=mine"], [cell])
    FILES[damage](store / "sweeps" / "zz.json")
    for name in (None, "mine"):
        sweep = find(store, name)
        assert sweep.cells == (cell,)


@pytest.mark.sampled
@pytest.mark.parametrize("damage", FILES)
def test_an_index_that_is_none_is_not_needed(
    damage: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store / "index.duckdb"
    if path.is_dir():
        shutil.rmtree(path)
    FILES[damage](path)
    overview(store, tmp_path, capsys)


@pytest.mark.parametrize("expiry", ["NaN", "Infinity", "-1", "true", '"x"', "1e999"])
def test_a_lease_without_an_end_has_the_usual_one(expiry: str, tmp_path: Path) -> None:
    path = tmp_path / "lease"
    path.write_text(f'{{"id": "a", "expiry": {expiry}}}\n')
    seen = read_lease(path)
    assert seen.expiry(60.0) in (60.0, 1.0)
