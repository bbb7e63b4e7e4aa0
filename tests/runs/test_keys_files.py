"""What a run reads is part of its key: checkpoints, calibration, task files, code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.engine.artifacts.fitprune_schemes import save_scheme, scheme_artifact
from espalier.harness.engine.artifacts.priors import load_prior, save_prior
from espalier.harness.errors import UserError
from espalier.harness.models.adapter import ADAPTERS
from espalier.harness.paths import ROOT
from espalier.harness.runs import run_key as keys
from espalier.harness.runs.codebase import stamp
from espalier.harness.runs.preflight import Job, check
from espalier.harness.runs.reach import Reach, reach, reaches
from espalier.harness.runs.roots import BY_ADAPTER, BY_SIGNAL, STOPPED, roots_of
from espalier.harness.runs.run_key import key_parts, run_key, task_files
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.revisions import model_revision
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.signals import SIGNALS

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
    command = read_command([f"store={store}", "method=fastv", "ratio=0.5", *argv])
    assert command is not None
    return build_spec(command.cells[0])


def job_of(store: Path, *argv: str) -> Job:
    return check(spec_of(store, *argv), Digests())


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
    found = {}
    for module in ("scoring", "hashing"):
        (tmp_path / "utils.py").write_text(
            f"from espalier.harness.seedling import {module}\nuse = {module}\n"
        )
        spec = replace(plain.spec, benchmark=replace(plain.spec.benchmark, sources=(tmp_path,)))
        code = reaches(ROOT).base
        walked = reach(code, roots_of(spec, plain.method, code, [tmp_path / "utils.py"])).code
        found[module] = {name for name, _ in walked}
    assert "espalier.harness.seedling.scene_scores" in found["scoring"] - found["hashing"]


def walked(*argv: str) -> Reach:
    """Return what a run reaches."""
    spec = spec_of(Path("store"), *argv)
    method = build_method(spec.method.name, spec.method.params)
    code = reaches(ROOT).base
    files = [path for found in task_files(spec.benchmark).values() for path in found]
    return reach(code, roots_of(spec, method, code, files))


@pytest.fixture(scope="module")
def everything() -> Reach:
    """What runs of each kind and family reach, together."""
    together = Reach()
    for argv in (
        *((f"method={name}",) for name in METHODS.names()),
        *(("method=fastv", f"model.adapter={name}") for name in ADAPTERS.names()),
        ("method=fastv", "benchmark=video_detail_caption"),
    ):
        found = walked(*argv)
        together.code |= found.code
        together.outside |= found.outside
        together.stopped |= found.stopped
        together.files |= found.files
    return together


@pytest.mark.slow
def test_every_reason_not_to_follow_is_needed(everything: Reach) -> None:
    assert everything.stopped == set(STOPPED)


def test_what_is_reached_and_not_hashed_says_why(everything: Reach) -> None:
    hashed = {module for module, _ in everything.code}
    for module in STOPPED:
        assert not any(one == module or one.startswith(f"{module}.") for one in hashed)


def test_tables_are_where_they_are_said_to_be() -> None:
    base = reaches(ROOT).base
    assert base.keys(BY_ADAPTER) == set(ADAPTERS.names())
    for table in BY_SIGNAL:
        assert base.keys(table) <= set(SIGNALS)
        assert base.keys(table), f"{table} has no entries"


def test_every_table_by_signal_is_named(everything: Reach) -> None:
    base = reaches(ROOT).base
    found = set()
    for path, _, _ in everything.files:
        if path.is_relative_to(ROOT / "harness"):
            module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            source = base.source(stamp(path), module)  # type: ignore[arg-type]
            found |= {
                f"{module}:{name}"
                for name, entries in (*source.items.items(), *source.entries.items())
                if (module, name) in everything.code or any(m == module for m, _ in everything.code)
                if entries and set(entries) <= set(SIGNALS)
            }
    assert found == set(BY_SIGNAL)


def test_no_code_is_found_in_other_ways(everything: Reach) -> None:
    """Nothing that a run reaches imports by a computed name, evaluates text or reads docstrings."""
    base = reaches(ROOT).base
    called, asked = (
        {"__import__", "eval", "exec", "globals"},
        {"import_module", "__doc__", "__subclasses__"},
    )
    for module, name in everything.code:
        path = base.path(module)
        if path is not None:
            source = base.source(stamp(path), module)  # type: ignore[arg-type]
            code = source.definitions.get(name, source.effects)
            assert not called.intersection(chain[0] for chain in code.uses), (module, name)
            assert not asked.intersection(one for chain in code.uses for one in chain), (
                module,
                name,
            )


def test_packages_that_a_run_reaches_have_their_version_in_the_key(everything: Reach) -> None:
    known = packages_distributions()
    scorers = [walked("method=fastv", f"benchmark={name}").outside for name in SCORED]
    named = {name.partition(".")[0] for name in everything.outside.union(*scorers)}
    third = named - set(sys.stdlib_module_names) - {"harness", "methods", "tasks"}
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
        job_of(tmp_path / "store", f"benchmark.path={tmp_path}", "benchmark.dataset.path=a/b")
