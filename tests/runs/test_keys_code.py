"""Of the code, a run key changes with the files that the run imports, and with no other."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.harness.runs.run_key import key_parts, run_key
from espalier.harness.store.files.digests import Digests
from tests.runs.codetree import RUNS, Tree, other_code, run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, dict[str, str]]:
    tree = Tree.copied(tmp_path_factory.mktemp("code"))
    return tree, tree.keys()


@pytest.fixture
def tree(original: tuple[Tree, dict[str, str]]) -> Iterator[Tree]:
    """The copy of the code, which is put right afterwards."""
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


@pytest.mark.parametrize(
    "name",
    ["harness/models/llava.py", "harness/engine/signals/deciders.py", "methods/fastv.py"],
)
def test_a_new_file_changes_no_key(tree: Tree, plain: dict[str, str], name: str) -> None:
    line = 'ADAPTERS.add("novel", "espalier.harness.models.novel:LlavaAdapter")'
    if name == "harness/models/llava.py":
        tree.edit("harness/models/families.py", lambda text: f"{text}\n{line}\n")
    path = tree.root / name
    shutil.copyfile(path, path.with_name("novel.py"))
    assert changed(tree, plain) == set()


@pytest.mark.parametrize("name", RUNS)
def test_a_model_that_can_give_more_has_the_same_runs(name: str) -> None:
    spec, method = run(name)
    facts = replace(spec.model.facts, signals=spec.model.facts.signals | {"novel"})
    richer = replace(spec, model=replace(spec.model, facts=facts))
    assert key_parts(richer, method, Digests()) == key_parts(spec, method, Digests())


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [
        "methods/divprune.py",
        "methods/select/dpp.py",
        "harness/models/internvl.py",
        "harness/models/smolvlm.py",
        "harness/runs/console.py",
        "harness/runs/wandb_log.py",
        "harness/reports/curves/method_report.py",
        "harness/store/__init__.py",
        "harness/errors.py",
        "harness/tools/calibration/prior_maps.py",
    ],
)
def test_files_of_others_change_no_key(tree: Tree, plain: dict[str, str], name: str) -> None:
    tree.edit(name, other_code)
    assert changed(tree, plain) == set()


# ---------------------------------------------------------------- what changes keys


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("methods/fastv.py", {"reducer"}),
        ("methods/select/topk.py", set(RUNS)),
        ("methods/pearl.py", {"decoder"}),
        ("methods/windows.py", {"decoder"}),
        ("methods/uniform.py", {"reads no signal"}),
        ("methods/none.py", set(RUNS)),
        ("harness/models/llava.py", set(RUNS)),
        ("harness/models/qwen2_vl.py", {"decoder"}),
        ("harness/engine/signals/decoder_attention.py", {"reducer"}),
        ("harness/engine/session.py", set(RUNS)),
        ("harness/engine/prefill.py", set(RUNS)),
        ("harness/engine/layout.py", set(RUNS)),
        ("harness/cost/flops.py", set(RUNS)),
        ("harness/cost/memory.py", set(RUNS)),
        ("harness/cost/budget.py", set(RUNS)),
        ("harness/evaluation/evaluate.py", set(RUNS)),
        ("harness/evaluation/chat_model.py", set(RUNS)),
        ("harness/evaluation/lmms_tasks.py", set(RUNS)),
        ("harness/evaluation/metric_scores.py", set(RUNS)),
        ("harness/runs/result_row.py", set(RUNS)),
        ("harness/specs/generation.py", set(RUNS)),
        ("harness/stats/score_intervals.py", set(RUNS)),
        ("tasks/seedling/utils.py", set(RUNS)),
        ("harness/seedling/scene_benchmarks.py", set(RUNS)),
    ],
)
def test_a_changed_line_of_a_file_that_a_run_imports_changes_its_key(
    tree: Tree, plain: dict[str, str], name: str, runs: set[str]
) -> None:
    tree.edit(name, other_code)
    others = changed(tree, plain)
    assert others >= runs
    if name.startswith(("methods/", "harness/models/", "harness/engine/signals/")):
        assert others == runs


@pytest.mark.parametrize("name", ["harness/cost/flops.py", "tasks/seedling/utils.py"])
def test_a_comment_counts(tree: Tree, plain: dict[str, str], name: str) -> None:
    tree.edit(name, lambda text: f"{text}# A remark.\n")
    assert changed(tree, plain) == set(RUNS)


def test_scores_of_the_task_stand_in_the_settings(tree: Tree) -> None:
    before = tree.parts("reducer")["settings"]
    tree.edit("harness/seedling/scene_benchmarks.py", other_code)
    assert tree.parts("reducer")["settings"] != before  # rows of both are not mixed


def test_a_method_in_a_module_of_the_user_counts_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_method_of_a_notebook.py"
    file.write_text(
        "from espalier.methods.uniform import Uniform\n\nclass Own(Uniform):\n    limit = 1\n"
    )
    from own_method_of_a_notebook import Own  # type: ignore[import-not-found]

    spec, _ = run("reads no signal")
    before = run_key(key_parts(spec, Own(), Digests()))
    file.write_text(file.read_text().replace("limit = 1", "limit = 12"))
    assert run_key(key_parts(spec, Own(), Digests())) != before
