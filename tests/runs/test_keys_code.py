"""Of the code, a run key changes with what the run can reach, and with nothing else."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.harness.runs import roots
from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.store.files.digests import Digests
from tests.runs.codetree import RUNS, Tree, other_code, other_words, run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, dict[str, str]]:
    tree = Tree.copied(tmp_path_factory.mktemp("code"))
    return tree, tree.keys()


@pytest.fixture
def tree(original: tuple[Tree, dict[str, str]]) -> Iterator[Tree]:
    """The copy of the code, as it was again afterwards."""
    copy = original[0]
    before = {path: path.read_bytes() for path in copy.root.rglob("*.py")}
    yield copy
    for path in copy.root.rglob("*.py"):
        if path not in before:
            path.unlink()
        elif path.read_bytes() != before[path]:
            path.write_bytes(before[path])


@pytest.fixture
def plain(original: tuple[Tree, dict[str, str]]) -> dict[str, str]:
    return original[1]


def changed(tree: Tree, plain: dict[str, str]) -> set[str]:
    """Return the runs whose key is another than on the original."""
    return {name for name, key in tree.keys().items() if key != plain[name]}


# ---------------------------------------------------------------- what changes nothing


def test_where_the_code_lies_is_no_matter(plain: dict[str, str], tmp_path: Path) -> None:
    assert Tree.copied(tmp_path / "elsewhere").keys() == plain


@pytest.mark.slow
def test_comments_docstrings_and_formatting_are_no_code(tree: Tree, plain: dict[str, str]) -> None:
    for path in tree.root.rglob("*.py"):
        path.write_text(other_words(path.read_text()))
    assert changed(tree, plain) == set()


def test_annotations_of_functions_are_no_code(tree: Tree, plain: dict[str, str]) -> None:
    tree.edit(
        "harness/cost/flops.py",
        lambda text: re.sub(r"\) -> (int|float|Components):", ") -> object:", text),
    )
    assert changed(tree, plain) == set()


def test_a_new_adapter_changes_no_key(tree: Tree, plain: dict[str, str]) -> None:
    module, _, table = roots.BY_ADAPTER.partition(":")
    add(tree, module, table)
    copy(tree, "harness/models/llava.py", "harness/models/novel.py")
    assert changed(tree, plain) == set()


@pytest.mark.parametrize("table", roots.BY_SIGNAL)
def test_a_new_signal_changes_no_key(tree: Tree, plain: dict[str, str], table: str) -> None:
    module, _, name = table.partition(":")
    add(tree, module, name)
    declared = [path for path in tree.root.glob("methods/*.py") if LISTED.search(path.read_text())]
    assert len(declared) == 1
    listed = declared[0].relative_to(tree.root).as_posix()
    tree.edit(listed, lambda text: LISTED.sub(r'\g<0>\n    "novel": "(B, N) something",', text))
    assert changed(tree, plain) == set()


#: Where the signals are listed.
LISTED = re.compile(r"^SIGNALS\b[^=\n]*= \{", re.MULTILINE)


@pytest.mark.parametrize("name", RUNS)
def test_a_model_that_can_give_more_has_the_same_runs(name: str) -> None:
    spec, method = run(name)
    facts = replace(spec.model.facts, signals=spec.model.facts.signals | {"novel"})
    richer = replace(spec, model=replace(spec.model, facts=facts))
    one, other = (key_parts(each, method, Digests()) for each in (spec, richer))
    assert one == other


def test_a_new_method_changes_no_key(tree: Tree, plain: dict[str, str]) -> None:
    copy(tree, "methods/fastv.py", "methods/novel.py")
    catalogue = tree.root / "harness" / "catalogue.py"
    if "METHODS.add(" in catalogue.read_text():
        add(tree, "espalier.harness.specs.catalogue", "METHODS")
    assert changed(tree, plain) == set()


def test_what_no_run_uses_changes_no_key(tree: Tree, plain: dict[str, str]) -> None:
    for name in ("harness/engine/session.py", "methods/fastv.py", "harness/cost/flops.py"):
        tree.edit(name, lambda text: f"{text}\n\ndef unused() -> int:\n    return 1\n")
    assert changed(tree, plain) == set()


@pytest.mark.parametrize(
    "name",
    [
        "methods/divprune.py",
        "methods/select/dpp.py",
        "harness/models/internvl.py",
        "harness/models/llava_onevision.py",
        "harness/runs/console.py",
        "harness/runs/wandb_log.py",
        "harness/reports/curves/method_report.py",
        "harness/store/__init__.py",
        "harness/errors.py",
        "harness/tools/calibration/prior_maps.py",
    ],
)
def test_what_others_reach_changes_no_key(tree: Tree, plain: dict[str, str], name: str) -> None:
    tree.edit(name, other_code)
    assert changed(tree, plain) == set()


# ---------------------------------------------------------------- what changes keys


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("methods/fastv.py", {"reducer"}),
        ("methods/select/topk.py", {"reducer", "reads no signal"}),
        ("methods/pearl.py", {"decoder"}),
        ("methods/windows.py", {"decoder"}),
        ("methods/uniform.py", {"reads no signal"}),
        ("methods/none.py", set(RUNS)),
        ("harness/models/llava.py", set(RUNS)),
        ("harness/models/qwen2_vl.py", {"decoder"}),
        ("harness/models/qwen_geometry.py", {"decoder"}),
        ("harness/engine/session.py", set(RUNS)),
        ("harness/engine/reduce.py", set(RUNS)),
        ("harness/engine/layout.py", set(RUNS)),
        ("harness/cost/flops.py", set(RUNS)),
        ("harness/cost/peak_memory.py", set(RUNS)),
        ("harness/cost/budget.py", set(RUNS)),
        ("harness/evaluation/evaluate.py", set(RUNS)),
        ("harness/evaluation/chat_model.py", set(RUNS)),
        ("harness/evaluation/lmms_tasks.py", set(RUNS)),
        ("harness/evaluation/metric_scores.py", set(RUNS)),
        ("harness/runs/result_row.py", set(RUNS)),
        ("harness/specs/generation.py", set(RUNS)),
        ("harness/stats/sample_clusters.py", set(RUNS)),
        ("tasks/seedling/utils.py", set(RUNS)),
        ("harness/seedling/scene_scores.py", set(RUNS)),
    ],
)
def test_a_changed_line_that_a_run_reaches_changes_its_key(
    tree: Tree, plain: dict[str, str], name: str, runs: set[str]
) -> None:
    tree.edit(name, other_code)
    found = changed(tree, plain)
    assert found >= runs
    if name.startswith(("methods/", "harness/models/")):
        assert found == runs


def test_a_constant_counts(tree: Tree, plain: dict[str, str]) -> None:
    tree.edit(
        "harness/evaluation/chat_model.py",
        lambda text: re.sub(r"^HOPELESS = .*", "HOPELESS = 7", text, flags=re.M),
    )
    assert changed(tree, plain) == set(RUNS)


@pytest.mark.parametrize("table", roots.BY_SIGNAL)
def test_a_signal_counts_for_those_that_read_it(
    tree: Tree, plain: dict[str, str], table: str
) -> None:
    module = table.partition(":")[0]
    path = f"{module.replace('.', '/')}.py"
    tree.edit(
        path, lambda text: re.sub(r'("last_attention"[:,] )("?)', r"\1\2novel_", text, count=1)
    )
    assert changed(tree, plain) == {"reducer"}


def test_scores_of_the_task_stand_in_the_settings(tree: Tree) -> None:
    before = tree.parts("reducer")["settings"]
    tree.edit("harness/seedling/scene_scores.py", other_code)
    assert tree.parts("reducer")["settings"] != before  # rows of both are not mixed


def test_somebodys_own_method_is_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_method_of_a_notebook.py"
    file.write_text(
        "from espalier.methods.uniform import Uniform\n\nclass Own(Uniform):\n    limit = 1\n"
    )
    from own_method_of_a_notebook import Own  # type: ignore[import-not-found]

    spec, _ = run("reads no signal")
    before = run_key(key_parts(spec, Own(), Digests()))
    file.write_text(file.read_text() + "# said\n")
    assert run_key(key_parts(spec, Own(), Digests())) == before
    file.write_text(file.read_text().replace("limit = 1", "limit = 12"))
    assert run_key(key_parts(spec, Own(), Digests())) != before


# ---------------------------------------------------------------- helpers


def copy(tree: Tree, name: str, new: str) -> None:
    shutil.copyfile(tree.root / name, tree.root / new)


def add(tree: Tree, module: str, table: str) -> None:
    """Enter something new in a table."""
    path = f"{module.replace('.', '/')}.py"
    written = re.compile(rf"^{table}\b[^=\n]*= \{{", re.MULTILINE)
    text = (tree.root / path).read_text()
    if written.search(text):
        tree.edit(path, lambda before: written.sub(r'\g<0>\n    "novel": len,', before))
    else:
        assert f"{table}.add(" in text
        line = f'{table}.add("novel", "espalier.harness.models.novel:LlavaAdapter")\n'
        tree.edit(path, lambda before: f"{before}\n{line}")
