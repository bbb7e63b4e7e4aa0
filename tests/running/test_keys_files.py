"""What a run reads is part of its key: checkpoints, calibration, task files, code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from harness.artifacts.priors import load_prior, save_prior
from harness.artifacts.schemes import save_scheme, scheme_artifact
from harness.config.build import build_spec
from harness.config.compose import read_command
from harness.digests import Digests
from harness.paths import ROOT
from harness.revisions import model_revision
from harness.running import keys
from harness.running.keys import key_parts, run_key
from harness.running.preflight import Job, check
from harness.specs import RunSpec

#: Files of a checkpoint that shape what goes in or comes out.
CHECKPOINT = (
    *("config.json", "generation_config.json", "model.safetensors", "model-00001-of-2.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt", "vocab.txt"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja"),
)

#: Code of the harness that a run goes through and that is not hashed: file or folder -> why.
UNHASHED = {
    "harness/__init__.py": "empty",
    "harness/artifacts/files.py": "reads files whose content is hashed",
    "harness/artifacts/schemes.py": "fills in hyper-parameters, which are settings",
    "harness/calibration/__init__.py": "empty",
    "harness/config": "makes the settings; speculative.py, which the decoders use, is hashed",
    "harness/errors.py": "error lines",
    "harness/ranks.py": "deals the samples out; the row is that of one process",
    "harness/registry.py": "finds classes by name; their files are hashed",
    "harness/running": "makes the key and stores rows; row.py, which computes their numbers, is hashed",
    "harness/store.py": "keeps what was measured",
    "methods/__init__.py": "empty",
    "harness/catalogue.py": "finds classes by name; their files are hashed",
}

#: Packages that hashed code imports and whose version is no part of the key: distribution -> why.
UNVERSIONED = {
    "huggingface-hub": "an error that it raises",
    "loguru": "log lines",
    "rich": "what is printed",
    "safetensors": "reads tensors bit for bit",
    "tenacity": "tries downloads again",
    "tqdm": "progress bars",
}


def spec_of(store: Path, *argv: str) -> RunSpec:
    command = read_command([f"store={store}", "method=fastv", "ratio=0.5", *argv])
    assert command is not None
    return build_spec(command.cells[0])


def job_of(store: Path, *argv: str) -> Job:
    return check(spec_of(store, *argv), Digests())


def key_of(spec: RunSpec, job: Job, digests: Digests | None = None) -> str:
    return run_key(key_parts(spec, job.method, digests or Digests()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("store"), "method=parallelvlm")


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


@dataclass
class Edited(Digests):
    """Digests as they would be if one file had another content."""

    changed: Path = Path()

    def file(self, path: Path) -> str:
        return "other" if path == self.changed else super().file(path)


@pytest.mark.parametrize(
    "name",
    [
        "methods/parallelvlm.py",
        "methods/windows.py",
        "methods/select/ranking.py",
        "methods/base.py",
        *keys.ENGINE_SOURCES,
    ],
)
def test_every_source_counts(parallel: Job, name: str) -> None:
    path = ROOT / name
    file = path if path.is_file() else sorted(path.glob("[a-z]*.py"))[-1]
    assert key_of(parallel.spec, parallel, Edited(changed=file)) != parallel.key


def test_what_the_engine_imports_of_methods_counts_for_every_method(plain: Job) -> None:
    tiles = ROOT / "methods" / "select" / "tiles.py"
    assert tiles not in keys._method_files(plain.method)
    assert key_of(plain.spec, plain, Edited(changed=tiles)) != plain.key


def test_modules_count_however_they_are_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for line in (
        "from methods.windows import x",
        "import methods.windows",
        "import methods.windows as w",
        "from methods import windows",
    ):
        file.write_text(line)
        keys._imported_methods.cache_clear()
        assert ROOT / "methods" / "windows.py" in keys._imported_methods(file), line
    keys._imported_methods.cache_clear()


def test_code_that_hashed_code_imports_is_hashed_or_says_why_not() -> None:
    hashed = _hashed()
    imported = {file for path in hashed for file in _modules(path)}
    names = {file.relative_to(ROOT).as_posix() for file in imported - hashed}
    unexplained = {
        name for name in names if name not in UNHASHED and name.rpartition("/")[0] not in UNHASHED
    }
    assert unexplained == set()


def test_packages_that_hashed_code_imports_have_their_version_in_the_key() -> None:
    known = packages_distributions()
    roots = {name.partition(".")[0] for path in _hashed() for name in _imported(path)}
    third = roots - set(sys.stdlib_module_names) - {"harness", "methods"}
    used = {known[name][0].lower().replace("_", "-") for name in third if name in known}
    assert used - set(keys.PACKAGES) - set(UNVERSIONED) == set()


def _hashed() -> set[Path]:
    return keys._with_methods(keys._python_files(keys.ENGINE_SOURCES))


def _modules(path: Path) -> set[Path]:
    files = {
        ROOT / f"{name.replace('.', '/')}{end}"
        for name in _imported(path)
        for end in (".py", "/__init__.py")
    }
    return {file for file in files if file.is_file()}


def _imported(path: Path) -> set[str]:
    """Return what a file imports while it runs, modules and names alike; imports for type checkers are left out."""
    tree = ast.parse(path.read_text())
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
