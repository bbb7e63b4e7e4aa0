"""What a run reaches is followed name by name, however it is imported; what else a file holds makes no difference."""

from __future__ import annotations

from pathlib import Path

import pytest
from espalier.harness.runs.codebase import Codebase
from espalier.harness.runs.reach import Reaches, Roots, reach

ROOT = Roots(("pack.start:main",))


def codebase(folder: Path, **files: str) -> Codebase:
    package = folder / "pack"
    package.mkdir(exist_ok=True)
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    return Codebase(folder, frozenset({"pack"}))


def reached(base: Codebase, roots: Roots = ROOT) -> set[str]:
    return {f"{module}:{name}" for module, name in reach(base, roots).code}


@pytest.mark.parametrize(
    "use",
    [
        "from pack.other import f\ndef main(): f()",
        "from pack.other import f as g\ndef main(): g()",
        "from pack import other\ndef main(): other.f()",
        "import pack.other\ndef main(): pack.other.f()",
        "import pack.other as o\ndef main(): o.f()",
        "from . import other\ndef main(): other.f()",
        "from .other import f\ndef main(): f()",
        "def main():\n    from pack.other import f\n    f()",
        "from pack.other import f\nTABLE = [f]\ndef main(): TABLE",
        "from pack.between import f\ndef main(): f()",
        "from pack.other import f\nclass main:\n    def go(self): f()",
        "def main(): load('pack.other:f')",
        "try:\n    from pack.other import f\nexcept ImportError:\n    f = None\ndef main(): f()",
    ],
)
def test_definitions_are_found_however_they_are_imported(tmp_path: Path, use: str) -> None:
    base = codebase(
        tmp_path,
        start=use,
        between="from pack.other import f\nfrom pack.other import g",
        other="def f(): h()\ndef g(): 1\ndef h(): 2",
    )
    found = reached(base)
    assert {"pack.other:f", "pack.other:h"} <= found
    assert "pack.other:g" not in found


def test_a_module_that_is_handed_on_counts_whole(tmp_path: Path) -> None:
    base = codebase(
        tmp_path, start="from pack import other\ndef main(): take(other)", other="x = 1\ndef f(): 1"
    )
    assert {"pack.other:x", "pack.other:f"} <= reached(base)


def test_all_that_a_star_imports_counts(tmp_path: Path) -> None:
    base = codebase(tmp_path, start="from pack.other import *\ndef main(): f()", other="def f(): 1")
    assert "pack.other:f" in reached(base)


def test_what_an_import_runs_counts(tmp_path: Path) -> None:
    base = codebase(
        tmp_path, start="import pack.other\ndef main(): 1", other="import torch\ntorch.x = 1\ny = 2"
    )
    assert {"pack.other:"} == {name for name in reached(base) if "other" in name}


def test_imports_for_type_checkers_do_not_run(tmp_path: Path) -> None:
    start = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.other import A\n"
        "    from pack.more import B\ndef main(a: A): 1"
    )
    base = codebase(tmp_path, start=start, other="class A: 1\nclass C: 2", more="print()")
    # Whoever calls `main` hands it an A.
    assert reached(base) == {"pack.start:main", "pack.other:A"}


def test_the_same_name_of_another_module_is_another_thing(tmp_path: Path) -> None:
    files = {
        "a": "def f(): 1",
        "b": "def f(): 2",
        "both": "from pack import a, b\ndef g(): a.f() + b.f()",
    }
    digests = set()
    for one in ("a", "b"):
        start = f"from pack.{one} import f\nfrom pack.both import g\ndef main(): f() + g()"
        (tmp_path / one).mkdir()
        digests.add(reach(codebase(tmp_path / one, start=start, **files), ROOT).digest)
    assert len(digests) == 2


def test_a_library_s_function_under_the_same_name_is_another_thing(tmp_path: Path) -> None:
    digests = set()
    for one in ("floor", "ceil"):
        (tmp_path / one).mkdir()
        start = f"from math import {one} as f\ndef main(): f()"
        digests.add(reach(codebase(tmp_path / one, start=start), ROOT).digest)
    assert len(digests) == 2


@pytest.mark.parametrize(
    "table",
    [
        'TABLE = Registry()\nTABLE.add("a", "pack.other:f")\nTABLE.add("b", "pack.other:g")',
        'from pack.other import f, g\nTABLE = {"a": f, "b": g}',
        "from pack.other import f, g\nTABLE = {a: f, b: g}",
    ],
)
def test_of_a_table_the_chosen_entries_count(tmp_path: Path, table: str) -> None:
    start = f"{table}\ndef main(): TABLE"
    base = codebase(tmp_path, start=start, other="def f(): 1\ndef g(): 2")
    chosen = Roots(("pack.start:main",), choices=(("pack.start:TABLE", frozenset("a")),))
    assert "pack.other:f" in reached(base, chosen)
    assert "pack.other:g" not in reached(base, chosen)
    assert {"pack.other:f", "pack.other:g"} <= reached(base)


def test_what_is_stopped_is_not_followed(tmp_path: Path) -> None:
    files = {
        "start": "from pack.other import f, g\ndef main(): f() + g()",
        "other": "def f(): 1\ndef g(): 2",
    }
    base = codebase(tmp_path, **files)
    whole = Roots(("pack.start:main",), stops=frozenset({"pack.other"}))
    part = Roots(("pack.start:main",), stops=frozenset({"pack.other:g"}))
    assert reached(base, whole) == {"pack.start:main"}
    assert reached(base, part) == {"pack.start:main", "pack.other:f"}
    assert reach(base, part).stopped == {"pack.other:g"}


def test_a_decorator_that_may_register_runs_on_import(tmp_path: Path) -> None:
    start = "from pack import other\ndef main(): other.TABLE"
    other = "TABLE = []\ndef enter(f): TABLE.append(f)\n@enter\ndef g(): 1"
    found = reach(codebase(tmp_path, start=start, other=other), ROOT)
    assert ("pack.other", "") in found.code


def test_a_root_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"pack\.start:main"):
        reach(codebase(tmp_path, start="def other(): 1"), ROOT)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    base = codebase(
        tmp_path, start="from pack.other import f\ndef main(): f()", other="def f(): 1+1"
    )
    known = Reaches(base)
    before = known.digest(ROOT)
    codebase(
        tmp_path, start="from pack.other import f\ndef main(): f()", other="def f(): 1 + 1  # x"
    )
    assert known.digest(ROOT) == before
    codebase(tmp_path, start="from pack.other import f\ndef main(): f()", other="def f(): 1 + 27")
    assert known.digest(ROOT) != before
