"""lmms-eval's task files, read as text, say what lmms-eval reads in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.harness.config.lmms_task_files import Leaf, index_of, leaves, library
from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT

FILES = {
    "one.yaml": "include: _shared_yaml\n'task': one\ntest_split: test # ours\n",
    "_shared_yaml": "dataset_path: a/b\ntest_split: val\ntag:\n  - both\n  - some\n"
    "metric_list:\n  - metric: acc\n    aggregation: !function utils.mean\n"
    "  - metric: submission\n    aggregation: !function utils.write\n",
    "deep/two.yaml": "\ufefftask : two\noutput_type: loglikelihood\ntag: both\n",
    # The name stands in the included file alone.
    "deep/three.yaml": "include: _three\nmetric_list:\n  -\n  - {metric: wer, higher_is_better: false}\n",
    "deep/_three": "task: three\n",
    "few.yaml": "group: few\ntask:\n  # the first\n  - one\n  - task: one\n    dataset_path: c/d\n  - group: in\n"
    "    task: [three]\n",
    "tagged.yaml": "group: tagged\ntask: [both]\n",
    "base.yaml": "dataset_path: a/b\n",
}

#: Tasks that lmms-eval 0.7.3 declares in two files, of which the order of the file system picks one.
TWICE = {"mmbench_en_dev_reasoning", "mmvetv2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_an_index_holds_tasks_groups_and_tags(folder: Path) -> None:
    index = index_of(folder)
    assert index.names == {"one", "two", "three", "few", "tagged", "both", "some"}
    assert index.groups == {"few", "tagged"}
    assert {name: set(tasks) for name, tasks in index.tags.items()} == {
        "both": {"one", "two"},
        "some": {"one"},
    }
    assert index.files["three"] == folder / "deep" / "three.yaml"


def test_a_task_has_the_settings_of_its_includes_and_its_own_go_first(folder: Path) -> None:
    (leaf,) = index_of(folder).leaves("one")
    assert (leaf.settings["dataset_path"], leaf.settings["test_split"]) == ("a/b", "test")
    assert leaf.metrics == ("acc",)
    assert leaf.higher_is_better("acc")
    assert Leaf("x", {}).metrics == ("exact_match",)
    (pope,) = leaves("pope")
    assert pope.metrics[0] == "pope_accuracy"
    assert pope.settings["process_results"] == "utils.pope_process_results"


def test_a_group_yields_names_changed_tasks_and_groups_within(folder: Path) -> None:
    tasks = index_of(folder).leaves("few")
    assert [(leaf.name, leaf.settings.get("dataset_path")) for leaf in tasks] == [
        ("one", "a/b"),
        ("one", "c/d"),
        ("three", None),
    ]
    assert tasks[2].metrics == ("wer",)
    assert not tasks[2].higher_is_better("wer")
    assert {leaf.name for leaf in index_of(folder).leaves("tagged")} == {"one", "two"}


def test_a_file_that_is_no_yaml_is_named(folder: Path) -> None:
    (folder / "torn.yaml").write_text("task: [a\n")
    with pytest.raises(UserError, match=r"torn\.yaml cannot be read .* line \d"):
        index_of(folder)


@pytest.mark.slow
def test_the_index_is_lmms_evals_own() -> None:
    from lmms_eval.tasks import TaskManager  # seconds, for this test alone

    index, theirs = library(), TaskManager().task_index
    assert index.names == set(theirs)
    kinds = {name: entry["type"] for name, entry in theirs.items()}
    assert index.groups == {name for name, kind in kinds.items() if kind == "group"}
    assert set(index.tags) == {name for name, kind in kinds.items() if kind == "tag"}
    assert all(set(index.tags[name]) == set(theirs[name]["task"]) for name in index.tags)
    tasks = index.names - index.groups - set(index.tags)
    assert {name for name in tasks if str(index.files[name]) != theirs[name]["yaml_path"]} <= TWICE


@pytest.mark.parametrize(
    ("ours", "theirs"), [("pope_by_kind", "pope"), ("mmmu_val_by_rule", "mmmu_val")]
)
@pytest.mark.parametrize(
    "key",
    ["dataset_path", "test_split", "output_type", "generation_kwargs", "lmms_eval_specific_kwargs"],
)
def test_questions_are_those_of_lmms_eval(ours: str, theirs: str, key: str) -> None:
    (leaf,), (other,) = index_of(ROOT / "tasks").leaves(ours), library().leaves(theirs)
    assert leaf.settings[key] == other.settings[key]
