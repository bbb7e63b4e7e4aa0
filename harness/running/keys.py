"""The run key: a hash of everything that can change the numbers of a run, and of nothing else."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import getfile
from pathlib import Path
from typing import Any

from harness.adapters.conversations import CHECKPOINT
from harness.config.spec import ROOT, BenchmarkSpec, EngineSpec, ModelSpec, RunSpec
from methods.base import Decoder, Method

#: Raised when the meaning of the key itself changes.
KEY_VERSION = 1

#: Packages whose version can change an answer or a measurement.
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "lmms-eval",
    "numpy",
    "pillow",
    "av",
    "scikit-learn",
    "rapidfuzz",
)

#: Code that every run goes through; folders count all their Python files but benchmark scripts (bench*.py).
ENGINE_SOURCES = (
    "harness/adapters",
    "harness/media",
    "harness/engine",
    "harness/decoding",
    "harness/measure",
    "harness/evaluation",
    "harness/evaluate.py",
    "harness/budget.py",
    "harness/facts.py",
    "harness/calibration/priors.py",
    "harness/running/row.py",
)

#: Files of a model directory that shape its input or output.
MODEL_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model")

#: Files of a benchmark's folder that shape its samples or its scores.
TASK_FILES = ("*.py", "*.yaml", "*_yaml", "*.json", "*.jsonl", "*.csv", "*.parquet")


@dataclass
class Digests:
    """SHA-256 of files, remembered by path, size and time of change so that a sweep reads each weight file once."""

    _known: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def file(self, path: Path) -> str:
        """Return the SHA-256 of one file as hex. Cost: one read of the file, once."""
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        if key not in self._known:
            with path.open("rb") as stream:
                self._known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._known[key]

    def files(self, paths: Iterable[Path], root: Path) -> str:
        """Return one digest of several files' names (relative to `root`) and contents, in whatever order they come."""
        listing = sorted((path.relative_to(root).as_posix(), self.file(path)) for path in paths)
        return _digest(listing)


def run_key(parts: Mapping[str, Any]) -> str:
    """Return the key of `key_parts` as 16 hex digits."""
    return _digest(parts)[:16]


def key_parts(
    spec: RunSpec, method: Method, digests: Digests, artifacts: Iterable[Path] = ()
) -> dict[str, Any]:
    """Return everything that the key is computed from, ready for JSON.

    Left out on purpose: names of log back ends, the store, `force`, threads, error limits, where files lie.

    Args:
        spec: the run.
        method: the built method; its fields are the hyper-parameters with defaults filled in.
        digests: remembers file hashes over a sweep.
        artifacts: calibration files that the method reads.
    """
    return {
        "key_version": KEY_VERSION,
        "config": _config(spec, method, digests),
        "method_source": digests.files(_method_files(method), ROOT),
        "engine_source": digests.files(_python_files(ENGINE_SOURCES), ROOT),
        "model_revision": model_revision(spec.model, digests),
        "task_version": _task_version(spec.benchmark, digests),
        "artifacts": sorted(digests.file(path) for path in artifacts),
        "packages": {"python": platform.python_version(), **_versions(PACKAGES)},
    }


def _config(spec: RunSpec, method: Method, digests: Digests) -> dict[str, Any]:
    benchmark = spec.benchmark
    return {
        "model": _model(spec.model),
        "method": {
            "name": spec.method.name,
            "variant": spec.method.variant,
            "class": type(method).__qualname__,
            "params": asdict(method),
        },
        "draft": _draft(spec, method, digests),
        "benchmark": {
            "name": benchmark.name,
            "task": benchmark.task,
            "limit": benchmark.limit,
            "metrics": list(benchmark.metrics),
            "headline": benchmark.headline,
            "generation": dict(benchmark.generation),
        },
        "budget": asdict(spec.budget),
        "engine": _engine(spec.engine, method),
        "seed": spec.seed,
    }


def _model(model: ModelSpec) -> dict[str, Any]:
    facts = asdict(model.facts)
    facts["signals"] = sorted(facts["signals"])
    return {
        "name": model.name,
        "adapter": model.adapter,
        "dtype": model.dtype,
        "attention": model.attention,
        "weights": model.weights,
        "device": model.device,
        "device_map": model.device_map,
        "template": model.template,
        "conversation": model.conversation,
        "generation": dict(model.generation),
        "processor": dict(model.processor),
        "video": asdict(model.video),
        "media": model.media,
        "architecture": dict(model.architecture) if model.weights == "random" else None,
        "facts": facts,
    }


def _draft(spec: RunSpec, method: Method, digests: Digests) -> dict[str, Any] | None:
    draft = spec.method.draft
    if draft is None or not isinstance(method, Decoder):
        return None
    return {**_model(draft), "revision": model_revision(draft, digests)}


def _engine(engine: EngineSpec, method: Method) -> dict[str, Any]:
    """Return the engine's settings that matter to a method of this kind."""
    common = {
        "backend": engine.backend,
        # What `auto` finds depends on the machine; greedy answers do not depend on the batch.
        "batch_size": engine.batch_size or "auto",
        "positions": engine.positions,
        "warmup": engine.warmup,
    }
    if isinstance(method, Decoder):
        return {**common, "transport": engine.transport, "compare": engine.compare}
    return {**common, "rescore": engine.rescore}


def _method_files(method: Method) -> set[Path]:
    """Return the file of the method's class, and those of `methods` that it imports from, directly or not."""
    found: set[Path] = set()
    waiting = {Path(getfile(type(method)))}
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= _imported_methods(path) - found
    return {path for path in found if path.is_relative_to(ROOT)}


@cache
def _imported_methods(path: Path) -> frozenset[Path]:
    """Return the files of `methods` that a Python file imports names from."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    inside = [name.replace(".", "/") for name in names if name.split(".")[0] == "methods"]
    return frozenset(file for name in inside if (file := ROOT / f"{name}.py").is_file())


def _python_files(sources: Iterable[str]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        path = ROOT / source
        inside = [path] if path.is_file() else sorted(path.rglob("*.py"))
        found += [file for file in inside if not file.stem.startswith("bench")]
    return found


def model_revision(model: ModelSpec, digests: Digests) -> str:
    """Return what identifies a model's weights: a digest of a local directory's files, or hub id and commit.

    Random weights follow from the architecture and a fixed seed.
    """
    if model.weights == "random":
        facts = asdict(model.facts) | {"signals": sorted(model.facts.signals)}
        return (
            f"random-{_digest([facts, dict(model.architecture), _borrowed(model, digests)])[:12]}"
        )
    if model.path is not None:
        files = [file for pattern in MODEL_FILES for file in model.path.glob(pattern)]
        return digests.files(files, model.path)
    return f"{model.hub}@{cached_commit(model) or model.revision}"


def _borrowed(model: ModelSpec, digests: Digests) -> list[str]:
    """Return the hash of the chat template that a model without a checkpoint takes from a directory, if it does."""
    if model.conversation != CHECKPOINT or model.path is None:
        return []
    return [digests.file(file) for file in model.path.glob("chat_template.jinja")]


def cached_commit(model: ModelSpec) -> str | None:
    """Return the commit of `model.hub` at `model.revision` in the local Hugging Face cache, if it is there."""
    found = cached_file(model, "config.json")
    return None if found is None else found.parent.name


def cached_file(model: ModelSpec, name: str) -> Path | None:
    """Return a file of `model.hub` at `model.revision` in the local Hugging Face cache, if it is there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.hub or "", name, revision=model.revision)
    return Path(found) if isinstance(found, str) else None


def _task_version(benchmark: BenchmarkSpec, digests: Digests) -> list[str]:
    return [_tree(source, digests) for source in benchmark.sources]


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


def _digest(content: object) -> str:
    # NaN is refused: it is not equal to itself, so no key could ever be found again.
    canonical = json.dumps(
        content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
