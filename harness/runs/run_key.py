"""The run key: a hash of everything that can change the numbers of a run, and of nothing else.

Of the code that is what a run can reach: from its method, its adapters, the files of its task and `ENTRIES`, definition
by definition (harness/runs/reach.py), comments and docstrings left out.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from espalier.harness.evaluation.judging.judge_prompt import read_words
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.paths import ROOT
from espalier.harness.runs.codebase import Codebase
from espalier.harness.runs.reach import reaches
from espalier.harness.runs.roots import roots_of
from espalier.harness.runs.run_settings import Contents, cell_of, settings_of
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.revisions import model_revision
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.dataset_copies import Copies
from espalier.harness.store.files.digests import Digests, digest
from espalier.methods.base import Method

#: Raised when the meaning of the key itself changes.
KEY_VERSION = 3

#: Packages whose version can change an answer, a measurement or a score.
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
    "jinja2",
    "scipy",
    "nltk",
    "jieba",
    "lxml",
    "apted",
    "levenshtein",
    "table-recognition-metric",
    "pycocoevalcap",
)

#: Files of a benchmark's folder that shape its samples or its scores.
TASK_FILES = (
    *("*.py", "*.yaml", "*_yaml", "*.json", "*.jsonl", "*.csv", "*.parquet"),
    *("*.png", "*.jpg", "*.jpeg", "*.webp", "*.bmp", "*.gif", "*.tif", "*.tiff", "*.pdf"),
    *("*.mp4", "*.mkv", "*.webm", "*.avi", "*.mov"),
)


def run_key(parts: Mapping[str, Any]) -> str:
    """Return the key of `key_parts` as 16 hex digits."""
    return digest(parts)[:16]


def key_parts(
    spec: RunSpec,
    method: Method,
    digests: Digests,
    artifacts: Iterable[Path] = (),
    root: Path = ROOT,
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
        root: where the packages of the harness and of the methods lie.

    Cost: the first run of a process parses what it reaches, about half a second; then a millisecond.
    """
    code = reaches(root)
    files = task_files(spec.benchmark)
    draft = kind_of(method).identity(spec, method).draft
    contents = Contents(
        model=model_revision(spec.model, digests),
        draft=None if draft is None else model_revision(draft, digests),
        tasks=tuple(_digest(source, found, digests, code.base) for source, found in files.items()),
        artifacts=tuple(sorted(digests.file(path) for path in artifacts)),
        data=_data(spec.benchmark, digests),
        words=_words(spec),
    )
    roots = roots_of(spec, method, code.base, [path for found in files.values() for path in found])
    return {
        "key_version": KEY_VERSION,
        "cell": cell_of(spec),
        "settings": settings_of(spec, method, contents),
        "method_class": type(method).__qualname__,
        "code": code.digest(roots),
        "packages": {"python": platform.python_version(), **_versions(PACKAGES)},
    }


def _words(spec: RunSpec) -> str | None:
    """Return the digest of the words that the user gives a judge, None where the benchmark's own or none are asked."""
    path = spec.judge.prompt if "judge" in spec.benchmark.needs else None
    return None if path is None else read_words(path).digest


def task_files(benchmark: BenchmarkSpec) -> dict[Path, list[Path]]:
    """Return the files of each of a benchmark's sources; without any, of the folder that its task is read from."""
    folder = () if benchmark.include_path is None else (benchmark.include_path,)
    return {source: _inside(source) for source in benchmark.sources or folder}


def _data(benchmark: BenchmarkSpec, digests: Digests) -> str | None:
    if benchmark.path is None:
        return None
    return Copies(benchmark.path, benchmark.dataset.path).revision(digests)


def _inside(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    return [path for pattern in TASK_FILES for path in source.rglob(pattern)]


def _digest(source: Path, files: Iterable[Path], digests: Digests, base: Codebase) -> str:
    """Return one digest of the names and contents of a source's files; of what is Python, of the code."""
    listing = []
    for path in files:
        code = base.text(path)
        name = path.relative_to(source.parent).as_posix()
        listing.append((name, digests.file(path) if code is None else code))
    return digest(sorted(listing))


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    return {name: _version(name) for name in packages}


@cache  # reading a package's metadata takes milliseconds, and a sweep asks for every cell
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
