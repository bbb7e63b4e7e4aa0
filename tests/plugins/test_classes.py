"""`method=mine.py:MyMethod`: runs as a method of the repository does; every mistake is one line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import espalier
import run
from espalier.harness.cli.run import CELLS
from espalier.harness.errors import UserError
from espalier.harness.kinds.lookup import method_of
from espalier.harness.paths import ROOT
from espalier.harness.runs.admission import admit
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.plugins.code_reference import CodeReference, ImportedFiles
from espalier.harness.store.files.digests import Digests
from tests import commands
from tests.plugins.packages import method, write
from tests.runs.helpers import Bench, make_bench

OWN = f"""{method("FirstTokens")}

class Helper: ...


class Abstract(TokenReducer):
    K: int = 2


@dataclass(frozen=True)
class Half(TokenReducer):
    def sites(self, depth: int) -> tuple[Site, ...]:
        return ()


@dataclass(frozen=True)
class Bare(Half):
    p: float

    def plan(self, view: View, keep: int) -> Plan:
        raise NotImplementedError


@dataclass(frozen=True)
class FastV(FirstTokens): ...


@dataclass(frozen=True)
class Picky(FirstTokens):
    def __post_init__(self) -> None:
        raise RuntimeError("no day for it")


@dataclass(frozen=True)
class Unread(FirstTokens):
    q: "Nowhere" = 1


@dataclass(frozen=True)
class Tuned(FirstTokens):
    layers: tuple[int, ...] = (1, 2)
"""

#: A place, and words of its line.
MISTAKES = (
    ("none.py:A", ("none.py is not a file", "working directory")),
    ("own.py", ("names no class", "own.py:<class>")),
    ("own.py:", ("names no class", "valid: own.py:<class>")),
    ("own.py::FirstTokens", ("names no class", "valid: own.py:<class>")),
    ("own.py:FirstTokens:K", ("names no class", "valid: own.py:<class>")),
    ("zeros.py:A", ("cannot be imported: SyntaxError", "zeros.py:1")),
    ("own.py:FirstToken", ("has no class FirstToken", "own.py:Abstract, ")),
    ("own.py:Helper", ("Helper is no method", "TokenReducer")),
    ("own.py:Abstract", ("Abstract is no dataclass", "@dataclass(frozen=True)")),
    ("own.py:Half", ("Half lacks plan",)),
    ("own.py:Bare", ("Bare.p has no default",)),
    ("own.py:FastV", ("FastV is the name of method fastv", "another name")),
    ("own.py:Unread", ("annotations of Unread", "Nowhere")),
    ("own.py:Picky", ("cannot be built: RuntimeError: no day for it", "own.py:")),
    ("broken.py:A", ("ModuleNotFoundError: No module named 'nothing_here'", "broken.py:3")),
    ("exits.py:A", ("cannot be imported: SystemExit", "exits.py:2")),
    ("syntax.py:A", ("SyntaxError", "syntax.py:2")),
    ("no_such_module.x:A", ("there is no module no_such_module",)),
    ("https://a.b/own.py:A", ("is not a file",)),
    ("~nobody_of_that_name/own.py:A", ("is not a file",)),
    (f"{'a' * 300}.py:A", ("is not a file",)),
    (f"{'a' * 300}.py", ("is unknown",)),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = {
        "own.py": OWN,
        "broken.py": "class A: ...\n\nimport nothing_here\n",
        "exits.py": "class A: ...\nraise SystemExit(3)\n",
        "syntax.py": "class A: ...\ndef\n",
        "other.py": method("FirstTokens"),
        "zeros.py": "\0",
    }
    write(tmp_path, sources)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bench(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    return make_bench(folder / "store", capsys, monkeypatch)


spec_of = partial(commands.spec_of, "limit=1")


@pytest.mark.parametrize(("place", "words"), MISTAKES)
def test_a_mistake_is_one_line(bench: Bench, place: str, words: tuple[str, ...]) -> None:
    line = bench.refusal(f"method={place}")
    assert [word for word in ("error: method=", *words) if word not in line] == []


def test_two_classes_of_one_name_are_not_mixed(bench: Bench) -> None:
    line = bench.refusal("-m", "method=own.py:FirstTokens,other.py:FirstTokens")
    assert "have one name in results" in line


def test_its_hyper_parameters_are_keys(bench: Bench, folder: Path) -> None:
    done = bench.success("method=own.py:Tuned", "method.params.K=3", "method.params.layers=[4]")
    extra = done.last["extra"]
    assert (done.last["method"], extra["label"]) == ("Tuned", "K=3 layers=(4,)")
    assert extra["params"] == {"K": 3, "layers": [4]}
    assert [plugin["name"] for plugin in extra["plugins"]] == [str(folder / "own.py")]
    for change, words in {
        "k=3": "did you mean method.params.K?",
        "K=two": "method.params.K='two'",
    }.items():
        assert words in bench.refusal("method=own.py:Tuned", f"method.params.{change}")


def test_a_sweep_takes_it_beside_others_in_any_folder(bench: Bench, folder: Path) -> None:
    strange = folder / "my (1) méthods"
    write(strange, {"own.py": method("LastTokens")})
    done = bench.success("-m", f"method=none,own.py:FirstTokens,'{strange}/own.py:LastTokens'")
    assert [row["method"] for row in done.rows] == ["none", "FirstTokens", "LastTokens"]
    assert bench(f"method={strange}/own.py:LastTokens").last["method"] == "LastTokens"


def test_a_compressor_is_named_in_the_same_way(bench: Bench) -> None:
    done = bench("method=none", "compressor=own.py:FirstTokens")
    assert "compressor='FirstTokens' evicts no cache entries" in done.err
    source = "from espalier.methods.snapkv import SnapKV\nclass Window(SnapKV): ...\n"
    write(Path.cwd(), {"evict.py": source})
    spec = spec_of("method=none", "compressor=evict.py:Window", "compressor.ratio=0.5")
    assert spec.method.compressor is not None
    assert type(method_of(spec.method).parts[1]).__name__ == "Window"


def test_the_key_is_that_of_the_code_and_not_of_its_place(folder: Path) -> None:
    def key(place: str) -> tuple[str, list[str]]:
        job = admit(spec_of(f"method={place}"), Digests(), places=False)
        return job.key, job.parts["plugins"]

    first = key("other.py:FirstTokens")
    write(folder, {"elsewhere/other.py": method("FirstTokens")})
    assert key("elsewhere/other.py:FirstTokens") == first
    write(folder, {"elsewhere/other.py": f"# A comment.\n{method('FirstTokens')}"})
    assert key("elsewhere/other.py:FirstTokens") != first
    write(folder, {"other.py": method("FirstTokens").replace('"prefix"', '"layer", 2')})
    changed = key("other.py:FirstTokens")
    assert changed[0] != first[0]
    assert changed[1] != first[1]


def test_a_method_of_the_repository_has_the_parts_that_it_had() -> None:
    assert admit(spec_of("method=fastv"), Digests(), places=False).parts.keys() == {
        *("cell", "code", "key_version", "method_class", "packages", "settings")
    }


def test_a_changed_file_is_imported_again(folder: Path) -> None:
    assert build_method("FirstTokens", {}, "other.py:FirstTokens").K == 2  # type: ignore[attr-defined]
    write(folder, {"other.py": method("FirstTokens").replace("K: int = 2", "K: int = 17")})
    assert build_method("FirstTokens", {}, "other.py:FirstTokens").K == 17  # type: ignore[attr-defined]


@pytest.mark.slow
def test_another_process_reads_its_objects(folder: Path) -> None:
    write(folder, {"plain.py": "class Plain:\n    size = 3\n"})
    value = CodeReference(str(folder / "plain.py"), "Plain").load("method")()
    (folder / "pickled").write_bytes(pickle.dumps((ImportedFiles.of_process(), value)))
    code = "import pickle; print(pickle.load(open('pickled', 'rb'))[1].size)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "3\n", done.stderr


def test_a_job_runs_it_from_another_folder(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = dict(commands.cells_of("method=own.py:FirstTokens", "limit=3")[0])
    del cell["cluster"]
    config = {**cell, "store": str(folder / "store")}
    row = str(folder / "store" / "row.json")
    entry = {"key": "k", "row": row, "before": None, "config": config}
    write(folder, {"job.json": json.dumps([entry])})
    write(folder / "away", {"nothing": ""})
    monkeypatch.chdir(folder / "away")
    assert run.main([CELLS, str(folder / "job.json")]) == 0


def test_python_takes_the_same_names(folder: Path) -> None:
    model = espalier.load("seedling")
    assert espalier.apply(model, "own.py:Tuned", ratio=0.9, K=5) is not None
    with pytest.raises(UserError, match=r"method='.*own.py:Tund'.*valid: .*own.py:Tuned"):
        espalier.apply(model, "own.py:Tund")
    with pytest.raises(UserError, match=r"k=5 is no arg.*K=5\?.*hyper-parameters K, layers;"):
        espalier.apply(model, "own.py:Tuned", k=5)
