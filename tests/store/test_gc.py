"""`gc`: the selection of rows by commit, and the handling of removed files."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from espalier.harness.cli.store import main
from espalier.harness.store import Store
from espalier.harness.store.exports import write_tables
from espalier.harness.store.run_entries import entries
from espalier.harness.store.upkeep import NAMED, Waste, format_counts, move
from tests.store.test_upkeep import add, age, run_cli

COMMIT = "88e34e31ee17"
OTHER = "0123abcd4567"
DIRTY = f"{COMMIT}-dirty"
FULL = f"{COMMIT}{'5' * 28}"

#: Keys of the store.
KEYS = [letter * 16 for letter in "abcd"]


def fill(root: Path, *commits: str | None) -> None:
    """Store a row for each commit, under KEYS."""
    for key, commit in zip(KEYS, commits, strict=False):
        environment = {} if commit is None else {"commit": commit}
        add(root, key, [1, 0], extra={"failures": [], "environment": environment})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    fill(root, COMMIT, DIRTY, OTHER, None)
    return root


def keys(store: Path) -> list[str]:
    return [row["run_key"] for row in Store(store).rows()]


@pytest.mark.sampled
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


def test_tags_before_commits_and_several_commits_are_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, f"v0.1-3-g{COMMIT}", "v0.1", OTHER)
    names = ("--keep-code", FULL, "--keep-code", "v0.1")
    code, _, (_, line) = run_cli(
        capsys, "gc", *names, "--keep-code", OTHER, "--yes", "--store", tmp_path
    )
    assert (code, line, keys(tmp_path)) == (0, "nothing to move", KEYS[:3])
    assert run_cli(capsys, "gc", *names, "--yes", "--store", tmp_path)[0] == 0
    assert keys(tmp_path) == KEYS[:2]


@pytest.mark.sampled
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
    assert keys(store) == KEYS


def test_only_some_of_many_commits_are_named() -> None:
    counts = {f"c{number}": 1 for number in range(NAMED)}
    assert format_counts(counts).endswith(f", c{NAMED - 1} (1)")
    assert format_counts(counts | {"d": 1, "e": 1}).endswith(f", c{NAMED - 1} (1) and 2 more")


def test_the_beginning_of_two_commits_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, "abcd11111111", "abcd22222222")
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
    assert keys(store) == KEYS


def test_what_goes_can_be_taken_back_until_the_trash_is_empty(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Store(store).run("cccccccccccccccc").row()
    for _ in range(2):
        run_cli(capsys, "gc", "--keep-code", COMMIT, "--yes", "--store", store)
        (moved,) = store.glob(".trash/*/runs/cccccccccccccccc")
        assert {path.name for path in moved.iterdir()} == {"journal.jsonl", "row.json", "spec.json"}
        shutil.move(moved, store / "runs" / "cccccccccccccccc")
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
    broken = store / ".trash" / "broken" / "runs" / "eeeeeeeeeeeeeeee"
    broken.mkdir(parents=True)
    (broken / "row.json").write_text("{")
    assert [entry.key for entry in entries(store)] == [KEYS[0], KEYS[1], KEYS[3]]
    assert write_tables(store, tmp_path / "tables").rows == 3
    assert run_cli(capsys, "verify", "--store", store)[0] == 0
    assert main(["show", "cccccccccccccccc", "--store", str(store)]) == 2


def test_what_cannot_be_moved_is_named_and_the_rest_goes(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"commit": "c" * 12}
    add(store, "e" * 16, [1], extra={"failures": [], "environment": environment})
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
    assert keys(store) == KEYS


def test_a_trash_that_is_a_file_is_one_line(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / ".trash").write_text("")
    code, _, err = run_cli(capsys, "gc", "--keep-code", COMMIT, "--yes", "--store", store)
    assert code == 2
    assert f"{store / '.trash'} cannot be used (Not a directory)" in err[-1]
    assert keys(store) == KEYS
