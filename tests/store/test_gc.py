"""`gc`: the selection of rows by commit, and the handling of removed files."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.cli.store import main
from espalier.harness.store import Store
from espalier.harness.store.exports import write_tables
from espalier.harness.store.run_entries import entries
from espalier.harness.store.upkeep import NAMED, format_counts
from tests.store.test_upkeep import add, age, run_cli

COMMIT = "88e34e31ee17"
OTHER = "0123abcd4567"
DIRTY = f"{COMMIT}-dirty"
FULL = f"{COMMIT}{'5' * 28}"

#: Rows of the store, each with its commit.
ROWS = {
    "aaaaaaaaaaaaaaaa": COMMIT,
    "bbbbbbbbbbbbbbbb": DIRTY,
    "cccccccccccccccc": OTHER,
    "dddddddddddddddd": None,
}


def of(commit: str | None) -> dict[str, Any]:
    return {"failures": [], "environment": {} if commit is None else {"commit": commit}}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    for key, commit in ROWS.items():
        add(root, key, [1, 0], extra=of(commit))
    return root


def keys(store: Path) -> list[str]:
    return [row["run_key"] for row in Store(store).rows()]


@pytest.mark.parametrize(
    "name", [COMMIT, COMMIT[:4], COMMIT[:7], FULL, FULL.upper(), COMMIT.upper(), f" {COMMIT} "]
)
def test_a_commit_is_named_by_any_length_of_it(
    store: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, err = run_cli(capsys, "gc", "--keep-code", name, "--yes", "--store", store)
    assert code == 0
    assert keys(store) == ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "dddddddddddddddd"]
    assert [line.partition(" (")[0] for line in out] == [
        f"{store}/runs/cccccccccccccccc: of code {OTHER}"
    ]
    assert f"rows by commit: {COMMIT} (1), {DIRTY} (1), no commit (1)" in err[0]
    assert "-dirty had changes on top of its commit, and stays with it" in err[0]
    assert "a row without a commit stays" in err[0]


def test_changes_on_top_of_a_commit_are_named_alone(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(capsys, "gc", "--keep-code", DIRTY[2:], "--yes", "--store", store)[0] == 2
    assert run_cli(capsys, "gc", "--keep-code", f"{FULL}-dirty", "--yes", "--store", store)[0] == 0
    assert keys(store) == ["bbbbbbbbbbbbbbbb", "dddddddddddddddd"]


def test_a_tag_in_front_of_a_commit_hides_it_from_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, commit in (
        ("aaaaaaaaaaaaaaaa", f"v0.1-3-g{COMMIT}"),
        ("bbbbbbbbbbbbbbbb", "v0.1"),
        ("cccccccccccccccc", OTHER),
    ):
        add(tmp_path, key, [1], extra=of(commit))
    names = ("--keep-code", FULL, "--keep-code", "v0.1")
    assert run_cli(capsys, "gc", *names, "--yes", "--store", tmp_path)[0] == 0
    assert keys(tmp_path) == ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"]


def test_several_commits_may_be_kept(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--keep-code", COMMIT, "--keep-code", OTHER)
    code, _, (_, line) = run_cli(capsys, "gc", *names, "--yes", "--store", store)
    assert (code, line, keys(store)) == (0, "nothing to move", sorted(ROWS))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "must be a commit, 4 letters or more"),
        (" ", "must be a commit"),
        ("88e", "must be a commit"),
        ("-dirty", "must be a commit"),
        ("HEAD", "is the commit of no row, so that every row would go"),
        ("zzzz", "is the commit of no row"),
        ("34e3", "is the commit of no row"),
        (f"{OTHER}-dirty", "is the commit of no row"),
        (f"{COMMIT}z", "is the commit of no row"),
    ],
)
def test_what_names_no_commit_of_the_store_moves_nothing(
    store: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    option = f"--keep-code={name}"
    code, out, (line,) = run_cli(capsys, "gc", option, "--yes", "--store", store)
    assert (code, out) == (2, [])
    assert f"--keep-code={name!r} {reason}" in line
    assert f"{COMMIT} (1), {DIRTY} (1), {OTHER} (1), no commit (1)" in line
    assert keys(store) == sorted(ROWS)


def test_only_some_of_many_commits_are_named() -> None:
    counts = {f"c{number}": 1 for number in range(NAMED)}
    assert format_counts(counts).endswith(f", c{NAMED - 1} (1)")
    assert format_counts(counts | {"d": 1, "e": 1}).endswith(f", c{NAMED - 1} (1) and 2 more")


def test_the_beginning_of_two_commits_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, commit in (("aaaaaaaaaaaaaaaa", "abcd11111111"), ("bbbbbbbbbbbbbbbb", "abcd22222222")):
        add(tmp_path, key, [1], extra=of(commit))
    code, _, (line,) = run_cli(capsys, "gc", "--keep-code", "abcd", "--yes", "--store", tmp_path)
    assert code == 2
    assert "is the beginning of 2 commits; valid: more letters of one: abcd11111111 (1)" in line


def test_a_run_that_is_made_again_stays(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Store(store).run("cccccccccccccccc")
    run.forced.append({"task": "t", "doc_id": 0, "answer": "x"})
    with run.claim(0) as held:
        assert held
        age(run.path / "forced.jsonl", 9)
        options = ("--keep-code", COMMIT, "--days", 0, "--yes")
        assert run_cli(capsys, "gc", *options, "--store", store)[0] == 0
        assert (run.path / "forced.jsonl").exists()
    assert "cccccccccccccccc" in keys(store)


def test_a_run_that_begins_before_it_is_moved_stays(store: Path) -> None:
    from espalier.harness.store.upkeep import Waste, move

    path = store / "runs" / "cccccccccccccccc"
    # In a separate process: lmms-eval lets all locks of one path in a process be the same lock.
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()

    def compute() -> None:
        with Store(store).run("cccccccccccccccc").claim(0) as held:
            assert held
            ready.set()
            leave.wait(300)

    process = context.Process(target=compute)
    process.start()
    try:
        assert ready.wait(120)
        moved = move(store, [Waste(path, "of other code", 1, path)])
    finally:
        leave.set()
        process.join()
    assert moved.item_count == 0
    assert moved.stayed == [f"{path}: stays, a command computes the run now"]
    assert keys(store) == sorted(ROWS)


def test_what_goes_can_be_taken_back_until_the_trash_is_empty(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Store(store).run("cccccccccccccccc").row()
    for _ in range(2):
        run_cli(capsys, "gc", "--keep-code", COMMIT, "--yes", "--store", store)
        (folder,) = [
            one
            for one in (store / ".trash").iterdir()
            if (one / "runs" / "cccccccccccccccc").is_dir()
        ]
        assert sorted(path.name for path in (folder / "runs" / "cccccccccccccccc").iterdir()) == [
            "journal.jsonl",
            "row.json",
            "spec.json",
        ]
        shutil.move(folder / "runs" / "cccccccccccccccc", store / "runs" / "cccccccccccccccc")
        assert Store(store).run("cccccccccccccccc").row() == before
    run_cli(capsys, "gc", "--keep-code", COMMIT, "--yes", "--store", store)
    code, out, (line,) = run_cli(capsys, "gc", "--purge", "--store", store)
    assert (code, len(out)) == (0, 3)
    assert line.startswith("3 may go for good")
    assert any((store / ".trash").iterdir())
    assert run_cli(capsys, "gc", "--purge", "--yes", "--store", store)[0] == 0
    assert not any((store / ".trash").iterdir())
    assert keys(store) == ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "dddddddddddddddd"]
    options = ("--purge", "--keep-code", COMMIT, "--yes")
    assert run_cli(capsys, "gc", *options, "--store", store)[0] == 2


def test_no_reader_looks_into_the_trash(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_cli(capsys, "gc", "--keep-code", COMMIT, "--yes", "--store", store)
    (store / ".trash" / "broken" / "runs" / "eeeeeeeeeeeeeeee").mkdir(parents=True)
    (store / ".trash" / "broken" / "runs" / "eeeeeeeeeeeeeeee" / "row.json").write_text("{")
    assert [entry.key for entry in entries(store)] == [
        "aaaaaaaaaaaaaaaa",
        "bbbbbbbbbbbbbbbb",
        "dddddddddddddddd",
    ]
    assert write_tables(store, tmp_path / "tables").rows == 3
    assert run_cli(capsys, "verify", "--store", store)[0] == 0
    assert main(["show", "cccccccccccccccc", "--store", str(store)]) == 2


def test_what_cannot_be_moved_is_named_and_the_rest_goes(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "eeeeeeeeeeeeeeee", [1], extra=of("c" * 12))
    plain = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).name == "cccccccccccccccc":
            raise PermissionError(13, "Permission denied")
        plain(source, target)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(shutil, "copytree", refuse)
    code, _, err = run_cli(capsys, "gc", "--keep-code", COMMIT, "--yes", "--store", store)
    assert code == 1
    assert f"{store}/runs/cccccccccccccccc: stays, it cannot be moved (Permission denied)" in err
    assert keys(store) == [
        "aaaaaaaaaaaaaaaa",
        "bbbbbbbbbbbbbbbb",
        "cccccccccccccccc",
        "dddddddddddddddd",
    ]


def test_a_trash_that_is_a_file_is_one_line(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / ".trash").write_text("")
    code, _, err = run_cli(capsys, "gc", "--keep-code", COMMIT, "--yes", "--store", store)
    assert code == 2
    assert f"{store / '.trash'} cannot be used (Not a directory)" in err[-1]
    assert keys(store) == sorted(ROWS)
