"""A store of two users under the usual umask: the second one can read, and is refused early when writing."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espalier.harness.cli.store import main
from espalier.harness.errors import StoreLost, UserError
from espalier.harness.store import Store, Unreadable, exports
from tests.store.test_upkeep import add, age

NOBODY = 65_534

#: A finished run, and one that has only begun.
KEY, UNFINISHED = "a" * 16, "b" * 16

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user may enter; pytest closes those of `tmp_path` whenever another session starts."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def store(open_path: Path) -> Path:
    root = open_path / "store"
    add(root, KEY, [1, 0])
    Store(root).run(UNFINISHED).journal.append({"task": "t", "doc_id": 0, "answer": "x"})
    return root


def by_another_user(work: Callable[[], object]) -> object:
    """Return what a function gives in a process of another user; everything that it needs is imported."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                result: object = work()
            except (UserError, StoreLost) as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writing, pickle.dumps(result))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as end:
        content = end.read()
    assert os.waitpid(child, 0)[1] == 0
    return pickle.loads(content)


@as_root
def test_rows_that_are_there_are_served_and_nothing_is_written(store: Path) -> None:
    before = sorted(store.rglob("*"))
    assert by_another_user(lambda: [row["run_key"] for row in Store(store).rows()]) == [KEY]
    for command in (["ls"], ["show", KEY], ["verify", "--dry"]):
        code = by_another_user(lambda command=command: main([*command, "--store", str(store)]))
        assert code == 0
    assert [path for path in sorted(store.rglob("*")) if path.name != "index.duckdb"] == before


@as_root
def test_tables_of_a_store_of_another_user_can_be_written(store: Path, open_path: Path) -> None:
    tables = open_path / "tables"
    tables.mkdir()
    tables.chmod(0o777)
    assert by_another_user(lambda: exports.write_tables(store, tables).rows) == 1


@as_root
def test_a_run_of_another_user_is_refused_before_anything_is_computed(store: Path) -> None:
    line = by_another_user(lambda: Store(store).run(UNFINISHED).check_writable())
    assert str(line).startswith(
        f"UserError: store={str(store)!r}: run {UNFINISHED} belongs to user "
    )
    assert "it cannot be computed or resumed; valid: a store of your own" in str(line)
    # A folder that the group may write holds a journal that it may not.
    (store / "runs" / UNFINISHED).chmod(0o777)
    line = by_another_user(lambda: Store(store).run(UNFINISHED).check_writable())
    assert f"may not write {UNFINISHED}/journal.jsonl" in str(line)
    line = by_another_user(lambda: Store(store).run(UNFINISHED).journal.append({"a": 1}))
    assert str(line).startswith("StoreLost: ")
    assert "goes on" not in str(line)


@as_root
def test_what_a_group_shares_can_be_gone_on_with(open_path: Path) -> None:
    mask = os.umask(0)
    try:
        run = Store(open_path / "shared").run(KEY)
        run.journal.append({"task": "t", "doc_id": 0, "answer": "x"})
    finally:
        os.umask(mask)
    assert by_another_user(run.check_writable) is None
    assert by_another_user(lambda: run.journal.append({"a": 1})) is None


@pytest.mark.slow
@as_root
def test_a_run_that_its_owner_keeps_is_named_and_passed_over(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add(store, "cccccccccccccccc", [1])
    (store / "runs" / KEY).chmod(0o700)
    assert by_another_user(lambda: [row["run_key"] for row in Store(store).rows()]) == [
        "cccccccccccccccc"
    ]
    assert (
        f"{store}/runs/{KEY}/row.json cannot be read (Permission denied)" in capfd.readouterr().err
    )
    for command in (["ls"], ["verify", "--dry"], ["gc"]):
        code = by_another_user(lambda command=command: main([*command, "--store", str(store)]))
        assert code in ((1,) if command == ["verify", "--dry"] else (0, 1))
    line = by_another_user(lambda: Store(store).run(KEY).row())
    assert str(line).startswith("Unreadable: ")
    assert "force=true" not in str(line)
    assert issubclass(Unreadable, UserError)


@as_root
def test_what_another_user_may_not_move_stays(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder in (store, store / "runs"):
        folder.chmod(0o777)
    age(store / "runs" / UNFINISHED, 99)
    code = by_another_user(lambda: main(["gc", "--yes", "--store", str(store)]))
    assert code == 1
    assert (
        f"runs/{UNFINISHED}: stays, it cannot be moved (Permission denied)"
        in capfd.readouterr().err
    )
    assert (store / "runs" / UNFINISHED / "journal.jsonl").exists()


def test_the_owner_of_everything_is_never_refused(store: Path) -> None:
    Store(store).run(UNFINISHED).check_writable()
    shutil.rmtree(store)
