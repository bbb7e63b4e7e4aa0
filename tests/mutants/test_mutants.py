"""The mistakes made on purpose fit the code, and the runner reports which of them the tests notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import page
from tests.mutants.lists import HERE, Mutant, read_mutants
from tests.mutants.trying import copies, import_once, passes, verdict

CODE = """\
def larger(a, b):
    return a if a > b else b


def smaller(a, b):
    return a if a < b else b
"""

TEST = """\
from toy import larger


def test_larger():
    assert larger(1, 2) == 2
"""


def toy(old: str, new: str) -> Mutant:
    return Mutant("toy", "toy.py", old, new, ("test_toy.py",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "toy.py").write_text(CODE)
    (folder / "test_toy.py").write_text(TEST)
    return folder


def test_every_line_and_every_test_of_the_lists_is_there_once() -> None:
    mutants = read_mutants()
    packages = {mutant.package for mutant in mutants}
    assert packages == {path.stem for path in HERE.glob("*.yaml")}
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in mutants}) == len(mutants)


def test_a_list_that_is_older_than_the_code_says_where(tree: Path, tmp_path: Path) -> None:
    entry = "- {file: toy.py, old: 'a > b', new: 'a < b', tests: test_toy.py}\n"
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "toy.yaml").write_text(entry)
    assert read_mutants(folder, tree) == [toy("a > b", "a < b")]
    for former, now, message in (
        ("a > b", "a >= b", "has 0 of 'a >= b'"),
        ("old: 'a > b'", "old: return", "has 2 of 'return'"),
        ("new: 'a < b'", "new: 'a > b'", "has 1 of 'a > b'"),
        ("file: toy.py", "file: gone.py", "gone.py has 0"),
        ("test_toy.py", "test_gone.py", "no test test_gone.py"),
        ("test_toy.py", "test_toy.py::test_gone", "no test test_toy.py::test_gone"),
    ):
        (folder / "toy.yaml").write_text(entry.replace(former, now, 1))
        with pytest.raises(SystemExit, match=r"^toy\.yaml: ") as stale:
            read_mutants(folder, tree)
        assert message in str(stale.value)


@pytest.mark.slow
def test_a_mistake_is_killed_if_its_test_fails_and_put_right_again(tree: Path) -> None:
    noticed, unnoticed = toy("a > b", "a < b"), toy("a < b", "a > b")
    import_once(("pytest",))
    with copies(1, tree) as free:
        (copy,) = free.queue
        assert [verdict(mutant, free) for mutant in (noticed, unnoticed)] == ["killed", "survived"]
        assert (copy / "toy.py").read_text() == CODE
    assert (tree / "toy.py").read_text() == CODE


def test_tests_that_hang_have_noticed(tree: Path) -> None:
    (tree / "test_toy.py").write_text("import time\n\n\ndef test_hangs():\n    time.sleep(60)\n")
    assert not passes(tree, ("test_toy.py",), patience=1)


def test_the_page_counts_by_package() -> None:
    killed, survivor = toy("a > b", "a < b"), toy("a < b", "a > b")
    text = page([(killed, "killed"), (survivor, "survived")], "abc, 2030-01-01")
    assert "| toy | 2 | 1 | 50 % |\n| all | 2 | 1 | 50 % |" in text
    assert "- `toy.py: a > b`" in text
    assert "a < b" not in text
    assert "abc, 2030-01-01" in text
