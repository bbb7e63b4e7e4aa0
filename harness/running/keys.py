"""The run key: a hash of everything that can change the numbers of a run, and of nothing else."""

from __future__ import annotations

import ast
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import getfile
from pathlib import Path
from typing import Any

from harness.digests import Digests, digest
from harness.kinds.lookup import kind_of
from harness.paths import ROOT
from harness.revisions import model_revision
from harness.running.settings import Contents, cell_of, settings_of
from harness.specs import BenchmarkSpec, RunSpec
from methods.base import Method

#: Raised when the meaning of the key itself changes.
KEY_VERSION = 2

#: Packages whose version can change an answer or a measurement.
PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "lmms-eval",
    "numpy",
    "pillow",
    "av",
    "scikit-learn",
    "rapidfuzz",
    "scipy",
)

#: Code that every run goes through; folders count all their Python files. What these files import of `methods` is
#: added.
ENGINE_SOURCES = (
    "harness/adapters",
    "harness/media",
    "harness/engine",
    "harness/decoding",
    "harness/measure",
    "harness/evaluation",
    "harness/kinds",
    "harness/generation.py",
    "harness/budget.py",
    "harness/facts.py",
    "harness/stats.py",
    "harness/artifacts/priors.py",
    "harness/running/row.py",
)


#: Files of a benchmark's folder that shape its samples or its scores.
TASK_FILES = ("*.py", "*.yaml", "*_yaml", "*.json", "*.jsonl", "*.csv", "*.parquet")


def run_key(parts: Mapping[str, Any]) -> str:
    """Return the key of `key_parts` as 16 hex digits."""
    return digest(parts)[:16]


def key_parts(
    spec: RunSpec, method: Method, digests: Digests, artifacts: Iterable[Path] = ()
) -> dict[str, Any]:
    """Return everything that the key is computed from, ready for JSON.

    `cell` and `settings` stand in the row, so that a row says what made its numbers; the rest is code. Left out on
    purpose: names of log back ends, the store, `force`, threads, error limits, where files lie, and `engine.paired`,
    which measures beside a run that has ended: a stored row that lacks the speed-up asked for gets it without
    answering again.

    Args:
        spec: the run.
        method: the built method; its fields are the hyper-parameters with defaults filled in.
        digests: remembers file hashes over a sweep.
        artifacts: calibration files that the method reads.
    """
    return {
        "key_version": KEY_VERSION,
        "cell": cell_of(spec),
        "settings": settings_of(spec, method, _contents(spec, method, digests, artifacts)),
        "method_class": type(method).__qualname__,
        "method_source": digests.files(_method_files(method), ROOT),
        "engine_source": digests.files(_with_methods(_python_files(ENGINE_SOURCES)), ROOT),
        "packages": {"python": platform.python_version(), **_versions(PACKAGES)},
    }


def _contents(
    spec: RunSpec, method: Method, digests: Digests, artifacts: Iterable[Path]
) -> Contents:
    draft = kind_of(method).identity(spec, method).draft
    return Contents(
        model=model_revision(spec.model, digests),
        draft=None if draft is None else model_revision(draft, digests),
        tasks=_task_files(spec.benchmark, digests),
        artifacts=tuple(sorted(digests.file(path) for path in artifacts)),
    )


def _method_files(method: Method) -> set[Path]:
    """Return the files of the classes of a method and its parts, and what they import of `methods`, directly or not."""
    return _with_methods([Path(getfile(type(one))) for one in (method, *method.parts)])


def _with_methods(files: Iterable[Path]) -> set[Path]:
    """Return files of the repository and those of `methods` that they import, directly or not."""
    found: set[Path] = set()
    waiting = set(files)
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= _imported_methods(path) - found
    return {path for path in found if path.is_relative_to(ROOT)}


@cache
def _imported_methods(path: Path) -> frozenset[Path]:
    """Return the files of `methods` that a Python file imports, or imports names from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    inside = [name.replace(".", "/") for name in names if name.split(".")[0] == "methods"]
    return frozenset(file for name in inside if (file := ROOT / f"{name}.py").is_file())


def _python_files(sources: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        path = ROOT / source
        inside = [path] if path.is_file() else sorted(path.rglob("*.py"))
        found += [file for file in inside if not file.stem.startswith("bench")]
    return found


def _task_files(benchmark: BenchmarkSpec, digests: Digests) -> tuple[str, ...]:
    """Return digests of the benchmark's sources; without any, of the folder that its task is read from."""
    folder = () if benchmark.include_path is None else (benchmark.include_path,)
    return tuple(_tree(source, digests) for source in benchmark.sources or folder)


def _tree(source: Path, digests: Digests) -> str:
    files = [source] if source.is_file() else [f for kind in TASK_FILES for f in source.rglob(kind)]
    return digests.files(files, source.parent)


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    return {name: _version(name) for name in packages}


@cache  # reading a package's metadata takes milliseconds, and a sweep asks for every cell
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
