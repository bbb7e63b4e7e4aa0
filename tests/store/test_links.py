"""Links and foreign names in a store: nothing outside of it is written or deleted, nothing foreign in it is moved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espalier.harness.cli import wandb
from espalier.harness.errors import StoreLost, UserError
from espalier.harness.evaluation.judging.verdicts import VerdictStore
from espalier.harness.runs.wandb_log import MirrorMark, open_run
from espalier.harness.store import Store
from espalier.harness.store.files.journal import Journal
from espalier.harness.store.sweep_files import announce
from tests.refused import refused
from tests.store.test_upkeep import add, age, run_cli

KEY, OTHER = "a" * 16, "b" * 16

#: Names that no run has.
FOREIGN = (".git", "a b", "notes", "cafe", "2024", OTHER[1:], f"{KEY}0", KEY.upper(), f"{KEY}.old")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    add(root, KEY, [1, 0])
    return root


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file, and with a folder that looks like one of a store: no test may change it."""
    folder = tmp_path / "outside"
    (folder / "2026-01-01T00-00-00").mkdir(parents=True)
    (folder / "2026-01-01T00-00-00" / "thesis.tex").write_text("years of work")
    (folder / "journal.jsonl").write_text("{}\n{damaged\n")
    (folder / f".row.json-0000000a-{'1' * 32}").write_text("x")
    (folder / "logs").mkdir()
    (folder / "logs" / "x.log").write_text("key")
    before = content(folder)
    yield folder
    assert content(folder) == before


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("command", [("gc", "--purge"), ("gc", "--keep-code", "none"), ("rm", KEY)])
def test_a_linked_trash_is_refused(
    command: tuple[str, ...], store: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / ".trash").symlink_to(outside)
    if "--keep-code" in command:
        command = ("gc", "--keep-code", "c2c2")
        add(store, OTHER, [1], extra={"failures": [], "environment": {"commit": "c2c2"}})
    code, _, (*_, line) = run_cli(capsys, *command, "--yes", "--store", store)
    assert code == 2
    assert ".trash is a link, which may lead out of the store; valid: a folder" in line


def test_the_trash_is_emptied_of_what_gc_moved_there(
    store: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(capsys, "rm", KEY, "--yes", "--store", store)[0] == 0
    trash = store / ".trash"
    (moved,) = trash.iterdir()
    foreign = [trash / "thesis.tex", trash / "2026-01-01"]
    foreign[0].write_text("years of work")
    foreign[1].mkdir()
    (trash / "2026-02-02T00-00-00").symlink_to(outside)
    assert run_cli(capsys, "gc", "--purge", "--yes", "--store", store)[0] == 0
    assert not moved.exists()
    assert all(path.exists() for path in foreign)


@pytest.mark.slow
def test_folders_that_are_no_runs_stay(
    store: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = store / "runs"
    for name in FOREIGN:
        (runs / name).mkdir()
        (runs / name / "journal.jsonl").write_text("{}\n{damaged\n")
        age(runs / name, 99)
    (runs / OTHER).symlink_to(outside)
    before = content(runs)
    age(runs / KEY / "row.json", 99)
    for command in (
        ("gc", "--days", "0", "--yes"),
        *(("rm", name, "--yes") for name in (*FOREIGN, OTHER)),
        ("verify",),
    ):
        code, _, _ = run_cli(capsys, *command, "--store", store)
        assert code == (2 if command[0] == "rm" else 0)
        assert content(runs) == before
    unfinished = runs / ("c" * 16)
    unfinished.mkdir()
    age(unfinished, 99)
    assert run_cli(capsys, "gc", "--days", "0", "--yes", "--store", store)[0] == 0
    assert not unfinished.exists()


@pytest.mark.parametrize("command", [("gc", "--days", "0", "--yes"), ("rm", KEY), ("verify",)])
def test_linked_runs_are_refused(
    command: tuple[str, ...], store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "runs").rename(tmp_path / "elsewhere")
    (store / "runs").symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    code, _, (line,) = run_cli(capsys, *command, "--store", store)
    assert code == 2
    assert "runs is a link" in line
    assert content(tmp_path / "elsewhere") == before


def test_a_journal_is_not_written_through_a_link(store: Path, outside: Path) -> None:
    run = Store(store).run(OTHER)
    for target in ("journal.jsonl", "new.jsonl"):
        run.journal.path.symlink_to(outside / target)
        with pytest.raises(StoreLost, match="valid: a file in place of the link"):
            run.journal.append({"answer": "x"})
        assert "journal.jsonl is a link" in refused(run.check_writable)
        run.journal.path.unlink()


@pytest.mark.parametrize("target", ["outside/journal.jsonl", "nowhere"])
def test_a_linked_lease_is_refused_at_once(target: str, tmp_path: Path, outside: Path) -> None:
    run = Store(tmp_path / "store").run(KEY)
    (run.path / "lease").symlink_to(tmp_path / target)
    with pytest.raises(UserError, match="cannot be read as a lease"), run.claim(0):
        pass


def test_a_pipe_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "judge" / KEY[:2]).mkdir(parents=True)
    os.mkfifo(tmp_path / "judge" / KEY[:2] / f"{KEY}.json")
    assert VerdictStore(tmp_path / "judge").get(KEY) is None


@pytest.mark.parametrize("name", ["debug.log", "cache/wandb/logs/x.log", "cache", "data"])
def test_wandb_writes_through_no_link(name: str, tmp_path: Path, outside: Path) -> None:
    link = tmp_path / "store" / "wandb" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / "logs" / "x.log" if name.endswith(".log") else outside)
    assert "leads out of the store" in refused(open_run, tmp_path / "store", {})


@pytest.mark.parametrize("key", ["../../outside/x", "/tmp/x", ["x"], None, KEY.upper()])
def test_a_rebuilt_row_is_written_under_the_name_of_a_run(
    key: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "rows_of", lambda folder: [{"row.json": {"run_key": key}}])
    assert "is no name of a run" in refused(wandb.rebuild, tmp_path, Store(tmp_path / "store"))
    assert not any(tmp_path.rglob("*.json"))


def test_a_journal_is_made_of_its_own_files(journal: Journal, tmp_path: Path) -> None:
    journal.append({"answer": "x"})
    journal.of_rank(1).append({"answer": "y"})
    for name in ("journal.notes.jsonl", "journal.jsonl.jsonl", "journal.take1.txt"):
        (tmp_path / name).write_text('{"answer": "z"}\n')
    assert [entry["answer"] for entry in journal.entries()] == ["x", "y"]
    journal.clear()
    assert len([*tmp_path.iterdir()]) == 3


#: What writes below a folder of a store.
WRITERS: dict[str, Callable[[Path], object]] = {
    "runs": lambda store: Store(store).run(OTHER),
    f"runs/{OTHER}": lambda store: Store(store).run(OTHER),
    "sweeps": lambda store: announce(store, ["method=none"], []),
    "wandb": lambda store: MirrorMark.of(store, KEY),
    "wandb/mirrored": lambda store: MirrorMark.of(store, KEY).locked().__enter__(),
    "judge": lambda store: VerdictStore(store / "judge"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_folder_of_a_store_is_a_link(name: str, tmp_path: Path, outside: Path) -> None:
    link = tmp_path / "store" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(UserError, match="is a link, which may lead out of the store"):
        WRITERS[name](tmp_path / "store")


def test_the_store_itself_may_be_a_link(store: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store)
    run = Store(tmp_path / "link").run(OTHER)
    run.journal.append({"answer": "x"})
    Store(tmp_path / "link").check_writable()
    with run.claim(0) as claimed:
        assert claimed
