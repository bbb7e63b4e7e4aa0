"""What a run reads is part of its key: checkpoints, calibration, task files, code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from espalier.harness.engine.artifacts.fitprune_schemes import save_scheme, scheme_artifact
from espalier.harness.engine.artifacts.priors import load_prior, save_prior
from espalier.harness.errors import UserError
from espalier.harness.models.families import ADAPTERS
from espalier.harness.paths import ROOT
from espalier.harness.runs import run_key as keys
from espalier.harness.runs.admission import Job, admit
from espalier.harness.runs.code_files import SourceFile, Stamp, code_files
from espalier.harness.runs.run_key import EXCLUDED, key_parts, run_key, task_files
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.revisions import model_revision
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from tests import commands

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
    "pyarrow": "names a damaged file",
    "pyyaml": "reads the words that a judge is told, whose digest is hashed",
    "safetensors": "reads tensors bit for bit",
    "tenacity": "tries downloads again",
    "tqdm": "progress bars",
}

#: Benchmarks whose scorers import what others do not.
SCORED = ("ocean_ocr_document_zh", "nocaps", "llava_bench")


def spec_of(store: Path, *argv: str) -> RunSpec:
    return commands.spec_of(f"store={store}", "method=fastv", "ratio=0.5", *argv)


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
    found = set()
    for content in (None, "one", "other"):
        if content is not None:
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
        found.add(model_revision(spec.model, Digests()))
    assert len(found) == 3
    assert key_parts(spec, plain.method, Digests())["settings"]["model"]["revision"] in found


def test_notes_beside_a_checkpoint_do_not_count(tmp_path: Path, plain: Job) -> None:
    model = replace(plain.spec.model, path=tmp_path)
    before = model_revision(model, Digests())
    (tmp_path / "README.md").write_text("from somewhere")
    assert model_revision(model, Digests()) == before


# ---------------------------------------------------------------- calibration


def calibrate_prior(spec: RunSpec) -> None:
    """Store another prior for each layer that has one, of the same weights."""
    for layer in (1, 4):
        other = tuple(2 * one for one in load_prior(spec.model, layer))
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


def test_notes_in_the_code_of_a_task_do_not_count(tmp_path: Path, plain: Job) -> None:
    (tmp_path / "utils.py").write_text("one = 1\n")
    (tmp_path / "empty.py").write_text("")
    spec = replace(plain.spec, benchmark=replace(plain.spec.benchmark, sources=(tmp_path,)))
    before = key_of(spec, plain)
    (tmp_path / "utils.py").write_text('"""What it does."""\n\none = 1  # because\n')
    (tmp_path / "empty.py").write_text("# nothing\n")
    assert key_of(spec, plain) == before


def test_a_task_that_is_no_python_is_its_bytes(tmp_path: Path, plain: Job) -> None:
    (tmp_path / "utils.py").write_text("one = (")
    spec = replace(plain.spec, benchmark=replace(plain.spec.benchmark, sources=(tmp_path,)))
    before = key_of(spec, plain)
    (tmp_path / "utils.py").write_text("one = ((")
    assert key_of(spec, plain) != before


def test_what_a_task_imports_counts(tmp_path: Path, plain: Job) -> None:
    for module in ("scene_scores", "counter_random"):
        (tmp_path / "utils.py").write_text(f"from espalier.harness.seedling import {module}\n")
        closure = code_files(ROOT).closure([tmp_path / "utils.py"], EXCLUDED)
        names = {stamp.path.name for stamp in closure}
        assert ("scene_scores.py" in names) == (module == "scene_scores")


def files_of(*argv: str) -> dict[Stamp, SourceFile]:
    """Return the code of a run."""
    spec = spec_of(Path("store"), *argv)
    method = build_method(spec.method.name, spec.method.params)
    code = code_files(ROOT)
    entries = keys.entry_files(spec, method, code)
    entries += [
        path
        for files in task_files(spec.benchmark).values()
        for path in files
        if path.suffix == ".py"
    ]
    return code.closure(entries, EXCLUDED)


@pytest.fixture(scope="module")
def every_file() -> dict[Stamp, SourceFile]:
    """The code of runs of each kind and family, together."""
    families = (("method=fastv", f"model.adapter={name}") for name in ADAPTERS.names())
    files: dict[Stamp, SourceFile] = {}
    for argv in (
        *((f"method={name}",) for name in METHODS.names()),
        *families,
        ("method=d3tom", "model=seedling_diffusion", "benchmark=video_detail_caption"),
    ):
        files |= files_of(*argv)
    return files


@pytest.mark.exhaustive
def test_every_exclusion_is_needed(every_file: Mapping[Stamp, SourceFile]) -> None:
    imports = set().union(*(file.imports for file in every_file.values()))
    assert set(EXCLUDED) <= imports


@pytest.mark.slow
def test_no_code_is_imported_in_other_ways(every_file: Mapping[Stamp, SourceFile]) -> None:
    """No file of a run imports by a computed name but third-party packages, or evaluates text."""
    escapes = re.compile(
        r"__import__|(?<![.\w])(eval|exec|globals)\(|import_module\((?!MODULE|\"pypdfium2|f\"\{PACKAGE)"
    )
    for stamp in every_file:
        if "harness" in stamp.path.parts:
            assert not escapes.search(stamp.path.read_text()), stamp.path


def outside(files: Mapping[Stamp, SourceFile]) -> set[str]:
    """Return the packages outside the repository that some files import."""
    return {name.partition(".")[0] for file in files.values() for name in file.imports}


@pytest.mark.slow
def test_packages_that_a_run_imports_have_their_version_in_the_key(
    every_file: Mapping[Stamp, SourceFile],
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
    with pytest.raises(UserError, match="no data set 'a/b'; there is: somebody/answers"):
        job_of(
            *(tmp_path / "store", f"benchmark.path={tmp_path}", "benchmark.dataset.path=a/b"),
            "model.closed_vocabulary=false",
        )
