"""The run key: a hash of everything that can change the numbers of a run.

Of the code these are the files that a run imports, directly or not, from `ENTRIES`, its method, its kind, its model
families, its signals and its task (harness/runs/code_files.py).
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import getfile
from pathlib import Path
from typing import Any

from espalier.harness.cost.meter import PACKAGE as METERS
from espalier.harness.engine.signals.table import PRODUCERS
from espalier.harness.evaluation.judging.judge_prompt import read_prompt
from espalier.harness.kinds.checks.signal_check import signals_of
from espalier.harness.kinds.kind import Identity
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.quantisation import quantisation_of, quantised_packages
from espalier.harness.paths import ROOT
from espalier.harness.runs.code_files import CodeFiles, code_files, stamp_of
from espalier.harness.runs.own_code import is_importable, own_code, source_file
from espalier.harness.runs.plugin_code import PluginCode, plugins_of
from espalier.harness.runs.run_settings import Contents, cell_of, settings_of
from espalier.harness.runs.served.engine_process import engine_version
from espalier.harness.runs.served.engine_server import server_version
from espalier.harness.specs.backend_spec import BackendSpec
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.revisions import model_revision
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.dataset_copies import Copies
from espalier.harness.store.files.digests import Digests, digest
from espalier.methods.base import Decoder, Method

#: Raised when the meaning of the key itself changes.
KEY_VERSION = 4

#: Modules that make the numbers of every row (harness/runs/single_run.py).
ENTRIES = (
    "espalier.harness.models.adapter",
    "espalier.harness.engine.artifacts",
    "espalier.harness.evaluation.evaluate",
    "espalier.harness.cost.memory",
    "espalier.harness.runs.result_row",
)

#: Modules and packages that a run imports and that change no number: name -> why.
EXCLUDED = {
    "espalier.harness.errors": "error lines",
    "espalier.harness.evaluation.judging.client": "fetches verdicts; the requests are hashed",
    "espalier.harness.evaluation.judging.verdicts": "stores verdicts",
    "espalier.harness.kinds.checks": "refuses runs",
    "espalier.harness.kinds.lookup": "finds kinds; the chosen one is an entry",
    "espalier.harness.specs.plugins": "finds classes of users; the chosen ones are entries",
    "espalier.harness.specs.records": "reads own data, which are hashed; a source of benchmark=data",
    "espalier.harness.ranks": "distributes samples; the row is that of one process",
    "espalier.harness.specs.draft_errors": "error lines",
    "espalier.harness.specs.hub_cache": "finds files of a revision that is hashed",
    "espalier.harness.specs.labels": "names of rows and curves",
    "espalier.harness.specs.row_settings": "writes the settings, which are hashed",
    "espalier.harness.specs.registry": "finds classes by name; the chosen ones are entries",
    "espalier.harness.store": "stores rows",
}

#: Entries of a run that another engine answers: both sides of the pipe, and what that engine imports by name.
SERVED = (
    "espalier.harness.runs.served.served_session",
    "espalier.serve.child",
    "espalier.serve.plugin",
    "espalier.serve.architectures",
)

#: Further entries of a run that a server answers.
SERVER = ("espalier.harness.runs.served.engine_server",)

#: Packages that can change an answer, a measurement or a score.
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

    `cell` and `settings` are stored in the row, so that a row states what made its numbers; the rest is code. Left out
    on purpose: log back ends, the store, `force`, threads, error limits, the places of files, and `engine.paired`,
    which measures after a run has ended: a stored row without the speed-up gets it without answering again.

    Args:
        spec: the run.
        method: the built method; its fields are the hyper-parameters with defaults filled in.
        digests: remembers file hashes over a sweep.
        artifacts: calibration files that the method reads.
        root: the folder that holds harness, methods and tasks.

    Cost: the first run of a process parses its files, 0.4 seconds; then milliseconds.
    """
    code = code_files(root)
    sources = task_files(spec.benchmark)
    identity = kind_of(method, spec).identity(spec, method)
    draft = identity.draft
    contents = Contents(
        model=model_revision(spec.model, digests),
        draft=None if draft is None else model_revision(draft, digests),
        tasks=tuple(_digest(source, files, digests, code) for source, files in sources.items()),
        artifacts=tuple(sorted(digests.file(path) for path in artifacts)),
        data=_data(spec.benchmark, digests),
        words=_words(spec),
        engine=_engine(spec.backend),
        quantisation=quantisation_of(spec.model),
        draft_quantisation=None if draft is None else quantisation_of(draft),
    )
    # Methods that no module holds: older keys do not have this part.
    digests_of_code = [
        own_code(type(part)).digest for part in identity.methods if not is_importable(type(part))
    ]
    models = [spec.model] if draft is None else [spec.model, draft]
    unpackers = [package for model in models for package in quantised_packages(model)]
    entries = entry_files(spec, method, code)
    entries += [path for files in sources.values() for path in files if path.suffix == ".py"]
    plugins = plugins_of(spec)
    entries += [p for plugin in plugins for p in _plugin_files(plugin.root) if p.suffix == ".py"]
    plugin_digests = [plugin_digest(plugin, digests, code) for plugin in plugins]
    return {
        "key_version": KEY_VERSION,
        "cell": cell_of(spec),
        "settings": settings_of(spec, method, contents),
        "method_class": type(method).__qualname__,
        "code": code.digest(entries, EXCLUDED),
        "packages": {"python": platform.python_version(), **_versions([*PACKAGES, *unpackers])},
        **({"own_code": digests_of_code} if digests_of_code else {}),
        **({"plugins": plugin_digests} if plugin_digests else {}),
    }


def entry_files(spec: RunSpec, method: Method, code: CodeFiles) -> list[Path]:
    """Return the files that a run's code starts from, those of its task left out.

    Raises:
        LookupError: one of ENTRIES is not there.
    """
    identity = kind_of(method, spec).identity(spec, method)
    families = {model.adapter for model in (spec.model, identity.draft) if model is not None}
    modules = {*ENTRIES, type(kind_of(method, spec)).__module__}
    modules |= set(SERVED) if spec.backend.served else set()
    modules |= set(SERVER) if spec.backend.url is not None else set()
    modules |= {f"{METERS}.{name}" for name in spec.engine.meters}
    modules |= {PRODUCERS.module(name) for name in _signals(spec, identity) if name in PRODUCERS}
    files = []
    for module in sorted(modules):
        path = code.path(module)
        if path is None:
            raise LookupError(f"no module {module} below {code.root}")
        files.append(path)
    # Families of the repository are found by name: importing them takes seconds.
    places = [
        (code.path(ADAPTERS.module(name)) if name in ADAPTERS.names() else None)
        or Path(getfile(ADAPTERS.load(name)))
        for name in sorted(families)
    ]
    methods = {type(part) for part in (method, *identity.methods)}
    for part in methods:
        if is_importable(part):
            # A user's package may be called methods, too.
            is_own = part.__module__.startswith("espalier.")
            path = code.path(part.__module__) if is_own else None
            places.append(path or Path(getfile(part)))
        else:
            names = own_code(part).modules
            places += filter(None, (code.path(name) or source_file(name) for name in names))
    return files + places


def _signals(spec: RunSpec, identity: Identity) -> set[str]:
    """Return the signals that are read in the model, and in the draft."""
    signals: set[str] = set()
    for method in identity.methods:
        signals |= signals_of(method, spec.model.facts)
        reducer = method.reducer if isinstance(method, Decoder) else None
        if identity.draft is not None and reducer is not None:
            signals |= signals_of(reducer, identity.draft.facts)
    return signals


def _engine(backend: BackendSpec) -> str | None:
    """Return the version of the program that answers in the harness's place."""
    if backend.url is not None:
        return server_version(backend.url)
    return None if backend.python is None else engine_version(backend.python)


def _words(spec: RunSpec) -> str | None:
    """Return the digest of the user's prompt for a judge; None without one."""
    path = spec.judge.prompt if "judge" in spec.benchmark.needs else None
    return None if path is None else read_prompt(path).digest


def task_files(benchmark: BenchmarkSpec) -> dict[Path, list[Path]]:
    """Return the files of each source of a benchmark; without sources, of the folder of its task."""
    folder = () if benchmark.include_path is None else (benchmark.include_path,)
    return {source: _inside(source) for source in benchmark.sources or folder}


def _data(benchmark: BenchmarkSpec, digests: Digests) -> str | None:
    table = benchmark.own_data()
    if table is not None:
        return table.digest(digests)
    if benchmark.path is None:
        return None
    return Copies(benchmark.path, benchmark.dataset.path).revision(digests)


def _inside(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    return [path for pattern in TASK_FILES for path in source.rglob(pattern)]


def plugin_digest(plugin: PluginCode, digests: Digests, code: CodeFiles) -> str:
    """Return the digest of a user's code, as rows have it; nothing is imported."""
    return _digest(plugin.root, _plugin_files(plugin.root), digests, code)


def _plugin_files(root: Path) -> list[Path]:
    """Return the files of a user's code; what its configs set is in the settings."""
    return [path for path in _inside(root) if not path.is_relative_to(root / "conf")]


def _digest(source: Path, files: Iterable[Path], digests: Digests, code: CodeFiles) -> str:
    """Return one digest of the names and contents of a source's files; Python files count by their code."""
    listing = []
    for path in files:
        content = code.source(stamp_of(path)).digest if path.suffix == ".py" else digests.file(path)
        listing.append((path.relative_to(source.parent).as_posix(), content))
    return digest(sorted(listing))


def _versions(packages: Iterable[str]) -> dict[str, str | None]:
    return {name: _version(name) for name in packages}


@cache  # reading the metadata of a package takes milliseconds, and a sweep needs it for every cell
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
