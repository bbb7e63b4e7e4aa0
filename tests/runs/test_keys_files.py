"""What a run reads is part of its key: checkpoints, calibration, task files, code."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from espalier.harness.engine.artifacts import save_scheme, scheme_artifact
from espalier.harness.engine.priors import load_prior, save_prior
from espalier.harness.models.families import ADAPTERS
from espalier.harness.runs import run_key as keys
from espalier.harness.runs.admission import Job, admit
from espalier.harness.runs.run_key import EXCLUDED, code_files, imports_of, key_parts, run_key
from espalier.harness.runs.run_settings import task_files
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.plugins.code_reference import own_code
from espalier.harness.specs.revisions import model_revision
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests.refused import refused
from tests.runs.test_keys import spec_of

#: Files of a checkpoint that shape what goes in or comes out.
CHECKPOINT = (
    *("config.json", "generation_config.json", "model.safetensors", "model-00001-of-2.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt", "vocab.txt"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja"),
)

#: Packages that a run reaches and whose version is no part of the key: distribution -> why.
UNVERSIONED = {
    "filelock": "processes wait for each other",
    "fsspec": "opens files byte for byte, or refuses an address",
    "huggingface-hub": "an error that it raises",
    "loguru": "log lines",
    "pyyaml": "reads the words of a judge's prompt, with their digest in the key",
    "safetensors": "reads tensors bit for bit",
    "tenacity": "tries downloads again",
    "tqdm": "progress bars",
}

#: Benchmarks whose scorers import what others do not.
SCORED = ("ocean_ocr_document_zh", "nocaps", "llava_bench")


def job_of(store: Path, *argv: str) -> Job:
    return admit(spec_of(store, *argv), Digests())


def key_of(spec: RunSpec, job: Job) -> str:
    return run_key(key_parts(spec, job.method, Digests()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("store"))


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("name", CHECKPOINT)
def test_every_file_of_a_checkpoint_counts(tmp_path: Path, plain: Job, name: str) -> None:
    file = tmp_path / name
    spec = replace(plain.spec, model=replace(plain.spec.model, path=tmp_path))
    file.parent.mkdir(exist_ok=True)
    revisions = {model_revision(spec.model, Digests())}
    for content in ("first", "second"):
        file.write_text(content)
        revisions.add(model_revision(spec.model, Digests()))
    assert len(revisions) == 3
    assert key_parts(spec, plain.method, Digests())["settings"]["model"]["revision"] in revisions


def test_notes_beside_a_checkpoint_do_not_count(tmp_path: Path, plain: Job) -> None:
    model = replace(plain.spec.model, path=tmp_path)
    before = model_revision(model, Digests())
    (tmp_path / "README.md").write_text("from somewhere")
    assert model_revision(model, Digests()) == before


# ---------------------------------------------------------------- calibration


def calibrate_prior(spec: RunSpec) -> None:
    """Store another prior for each layer that has one, of the same weights."""
    for layer in (1, 4):
        other = tuple(2 * value for value in load_prior(spec.model, layer))
        made_from = {"images": "others", "maps": "others"}
        save_prior(spec.model, layer, other, made_from, spec.store)


def calibrate_scheme(spec: RunSpec) -> None:
    """Store another scheme, of the same weights."""
    rows = scheme_artifact(spec.model).read().tolist()
    other = tuple(map(tuple, [rows[0], *rows[2:]]))
    save_scheme(spec.model, other, {"images": "others"}, spec.store)


@pytest.mark.parametrize(
    ("method", "calibrate"), [("d2pruner", calibrate_prior), ("fitprune", calibrate_scheme)]
)
def test_another_calibration_is_another_run(
    tmp_path: Path, method: str, calibrate: Callable[[RunSpec], None]
) -> None:
    before = job_of(tmp_path, f"method={method}")
    assert job_of(tmp_path, f"method={method}").key == before.key
    calibrate(before.spec)
    after = job_of(tmp_path, f"method={method}")
    assert after.key != before.key
    # The row can tell them apart, too.
    assert after.parts["settings"] != before.parts["settings"]


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize("sources", [True, False])
@pytest.mark.parametrize("name", ["utils.py", "_template_yaml", "task.yaml", "samples.jsonl"])
def test_task_files_count_named_or_not(
    tmp_path: Path, plain: Job, name: str, sources: bool
) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / name).write_text("one")
    here = replace(plain.spec.benchmark, include_path=folder, sources=(folder,) if sources else ())
    spec = replace(plain.spec, benchmark=here)
    before = key_of(spec, plain)
    (folder / "notes.txt").write_text("not read by anything")
    assert key_of(spec, plain) == before
    (folder / name).write_text("other")
    assert key_of(spec, plain) != before


# ---------------------------------------------------------------- code


def test_a_task_that_is_no_python_is_its_bytes(tmp_path: Path, plain: Job) -> None:
    (tmp_path / "utils.py").write_text("one = (")
    spec = replace(plain.spec, benchmark=replace(plain.spec.benchmark, sources=(tmp_path,)))
    before = key_of(spec, plain)
    (tmp_path / "utils.py").write_text("one = ((")
    assert key_of(spec, plain) != before


def test_what_a_task_imports_counts(tmp_path: Path, plain: Job) -> None:
    for module in ("scene_questions", "counter_random"):
        (tmp_path / "utils.py").write_text(f"from espalier.harness.seedling import {module}\n")
        names = {path.name for path in code_files([tmp_path / "utils.py"])}
        assert ("scene_questions.py" in names) == (module == "scene_questions")


@pytest.mark.parametrize(
    ("use", "names"),
    [
        ("from espalier.harness.other import f", {"other"}),
        ("from espalier.harness import (\n    other,  # as well\n)", {"other"}),
        ("import espalier.harness.other as o", {"other"}),
        ("import torch, espalier.harness.other", {"other"}),
        ("def main():\n    from espalier.harness.other import f", {"other"}),
        ("from espalier.harness.between import *", {"between", "other"}),
        ("from espalier.harness import start", set()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from espalier.harness import other", set()),
        ("from espalier.harness.errors import f", set()),
        ("from espalier.harness.store.files import f", set()),
        ("from espalier.harness.errors_of_tasks import f", {"errors_of_tasks"}),
        ("import torch", set()),
    ],
)  # fmt: skip
def test_imported_files_count_except_excluded_ones(
    tmp_path: Path, use: str, names: set[str]
) -> None:
    files = {"start": use, "between": "from espalier.harness.other import f"}
    files |= dict.fromkeys(("__init__", "other", "unused", "errors", "errors_of_tasks"), "")
    files["store/files"] = ""
    (tmp_path / "harness" / "store").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "harness" / f"{name}.py").write_text(f"{text}\n")
    start = tmp_path / "harness" / "start.py"
    stems = {path.stem for path in code_files([start], tmp_path)}
    assert stems - {"__init__"} == names | {"start"}
    assert ("__init__" in stems) == ("espalier" in use and "TYPE_CHECKING" not in use)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "start.py"
    digests = []
    for text in ("x = 1", "x = 2", "x = 1"):
        file.write_text(text)
        os.utime(file, (0, len(digests)))
        digests.append(code_files([file], tmp_path)[file])
    assert digests[0] == digests[2] != digests[1]


def files_of(*argv: str) -> set[Path]:
    """Return the code of a run."""
    spec = spec_of(Path("store"), *argv)
    method = build_method(spec.method.name, spec.method.params)
    _, modules = own_code([type(method)])
    entries = [*keys.entry_files(spec, method), *modules.values()]
    entries += [
        path
        for files in task_files(spec.benchmark).values()
        for path in files
        if path.suffix == ".py"
    ]
    return set(code_files(entries))


@pytest.fixture(scope="module")
def every_file() -> set[Path]:
    """The code of runs of each kind and family, together."""
    families = (("method=fastv", f"model.adapter={name}") for name in ADAPTERS.names())
    lines = (
        *((f"method={name}",) for name in METHODS.names()),
        *families,
        ("method=d3tom", "model=seedling_diffusion", "benchmark=video_detail_caption"),
    )
    return set().union(*(files_of(*argv) for argv in lines))


def imported(files: Iterable[Path]) -> set[str]:
    """Return the names that files import when they run, by the parser."""
    names = set()
    for path in files:
        waiting: list[ast.AST] = [ast.parse(path.read_bytes())]
        while waiting:
            node = waiting.pop()
            is_unused = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            waiting += [] if is_unused else ast.iter_child_nodes(node)
            if isinstance(node, ast.Import | ast.ImportFrom):
                base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names |= {f"{base}{alias.name}" for alias in node.names}
    return names


@pytest.mark.slow
def test_the_imports_of_every_file_are_found(every_file: set[Path]) -> None:
    for path in every_file:
        assert imported([path]) <= imports_of(path.read_text()), path


@pytest.mark.exhaustive
def test_every_exclusion_is_needed(every_file: set[Path]) -> None:
    imports = set().union(*(imports_of(path.read_text()) for path in every_file))
    assert set(EXCLUDED) <= imports


@pytest.mark.slow
def test_no_code_is_imported_in_other_ways(every_file: set[Path]) -> None:
    """No file of a run imports by a computed name but third-party packages, or evaluates text."""
    escapes = re.compile(
        r"__import__|(?<![.\w])(eval|exec|globals)\(|import_module\((?!MODULE|\"pypdfium2|f\"\{PACKAGE)"
    )
    for path in every_file:
        if "harness" in path.parts:
            assert not escapes.search(path.read_text()), path


def outside(files: Iterable[Path]) -> set[str]:
    """Return the packages that some files import."""
    return {name.partition(".")[0] for name in imported(files)}


@pytest.mark.slow
def test_packages_that_a_run_imports_have_their_version_in_the_key(
    every_file: set[Path],
) -> None:
    known = packages_distributions()
    scorers = [outside(files_of("method=fastv", f"benchmark={name}")) for name in SCORED]
    named = outside(every_file).union(*scorers)
    third = named - set(sys.stdlib_module_names) - {"espalier"}
    assert third <= set(known)
    used = {known[name][0].lower().replace("_", "-") for name in third}
    assert used - set(keys.PACKAGES) - set(UNVERSIONED) == set()
    assert set(UNVERSIONED) <= used


def test_the_content_of_a_folder_of_data_counts_and_its_place_does_not(tmp_path: Path) -> None:
    def key(folder: Path) -> str:
        return job_of(tmp_path / "store", f"benchmark.path={folder}").key

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.parquet").write_bytes(b"rows")
    first = key(tmp_path / "one")
    assert key(tmp_path / "two") == first
    (tmp_path / "two" / "test.parquet").write_bytes(b"others")
    assert key(tmp_path / "two") not in (first, job_of(tmp_path / "store").key)


def test_a_folder_without_the_data_set_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "somebody" / "answers").mkdir(parents=True)
    assert "no data set 'a/b'; there is: somebody/answers" in refused(
        job_of,
        *(tmp_path / "store", f"benchmark.path={tmp_path}", "benchmark.dataset.path=a/b"),
        "model.closed_vocabulary=false",
    )
