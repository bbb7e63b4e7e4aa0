"""The run key: a hash of everything that can change the numbers of a run.

Of the code these are the files of this package that `ENTRIES`, the method, its kind, its model families, its signals
and its task import, directly or not. A file counts by its bytes, comments included.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from inspect import getfile
from pathlib import Path
from typing import Any

from espalier.harness.cost.meters import PACKAGE as METERS
from espalier.harness.engine.signals.table import PRODUCERS
from espalier.harness.kinds.kind import Identity
from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.signal_check import signals_of
from espalier.harness.models.families import ADAPTERS
from espalier.harness.models.quantisation import quantised_packages
from espalier.harness.paths import FOLDERS, ROOT
from espalier.harness.runs.environment import installed_version
from espalier.harness.runs.run_settings import (
    cell_of,
    contents_of,
    plugin_digest,
    plugin_files,
    settings_of,
    task_files,
)
from espalier.harness.specs.plugins.code_reference import own_code
from espalier.harness.specs.plugins.installed import plugins_of
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests, digest
from espalier.methods.base import Decoder, Method

#: Raised when the meaning of the key itself changes.
KEY_VERSION = 5

#: Modules that make the numbers of every row (harness/runs/single_run.py).
ENTRIES = (
    "espalier.harness.models.build_adapter",
    "espalier.harness.engine.priors",
    "espalier.harness.evaluation.evaluate",
    "espalier.harness.cost.memory",
    "espalier.harness.runs.result_row",
)

#: Modules and packages that a run imports and that change no number: name -> why.
EXCLUDED = {
    "espalier.harness.engine.signals.table": "finds signals by name; the chosen ones are entries",
    "espalier.harness.errors": "error lines",
    "espalier.harness.evaluation.judging.client": "fetches verdicts; the requests are hashed",
    "espalier.harness.evaluation.judging.verdicts": "stores verdicts",
    "espalier.harness.kinds.checkpoint_check": "refuses models",
    "espalier.harness.kinds.lookup": "finds kinds; the chosen one is an entry",
    "espalier.harness.models.families": "finds families by name; the chosen ones are entries",
    "espalier.harness.specs.plugins": "finds classes of users; the chosen ones are entries",
    "espalier.harness.specs.records": "reads own data, which are hashed; a source of benchmark=data",
    "espalier.harness.ranks": "distributes samples; the row is that of one process",
    "espalier.harness.specs.catalogue": "finds methods by name; the chosen ones are entries",
    "espalier.harness.specs.conflicts": "refuses runs",
    "espalier.harness.specs.hub_cache": "finds files of a revision that is hashed",
    "espalier.harness.specs.hub_files": "downloads files of a revision that is hashed",
    "espalier.harness.kinds.kind": "names of rows and curves",
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
    *("torch", "torchvision", "transformers", "tokenizers", "accelerate", "datasets", "lmms-eval"),
    *("numpy", "pillow", "av", "scikit-learn", "rapidfuzz", "jinja2", "scipy", "nltk", "jieba"),
    *("lxml", "apted", "levenshtein", "table-recognition-metric", "pycocoevalcap"),
)

#: Imports of a Python file: the package after `from`, and the names; those for type checkers do not run.
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+)?import[ \t]+(\([^)]*\)|.*)", re.M)
FOR_CHECKERS = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t].*)?\n)+", re.M)


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

    Cost: the first run of a process reads its files, 0.1 seconds; then milliseconds.
    """
    identity = kind_of(method, spec).identity(spec, method)
    models = [model for model in (spec.model, identity.draft) if model is not None]
    unpackers = [package for model in models for package in quantised_packages(model)]
    plugins = plugins_of(spec.classes, spec.benchmark.include_path)
    sources = [path for files in task_files(spec.benchmark).values() for path in files]
    sources += [path for plugin in plugins for path in plugin_files(plugin)]
    texts, modules = own_code({type(part) for part in (method, *identity.methods)})
    files = [_module_file(module, root) or file for module, file in modules.items()]
    entries = [path for path in (*files, *sources) if path.suffix == ".py"]
    entries = [*entry_files(spec, method, root), *entries]
    code = digests.once(
        ("code", root, frozenset(entries)), lambda: sorted(code_files(entries, root).values())
    )
    return {
        "key_version": KEY_VERSION,
        "cell": cell_of(spec),
        "settings": settings_of(spec, method, contents_of(spec, method, digests, artifacts)),
        "method_class": type(method).__qualname__,
        "code": digest([code, *texts]),
        "packages": {
            "python": platform.python_version(),
            **{name: installed_version(name) for name in [*PACKAGES, *unpackers]},
        },
        **({"plugins": [plugin_digest(plugin, digests) for plugin in plugins]} if plugins else {}),
    }


def entry_files(spec: RunSpec, method: Method, root: Path = ROOT) -> list[Path]:
    """Return the files that a run's code starts from, those of its methods and its task left out.

    Raises:
        LookupError: one of ENTRIES is not there.
    """
    identity = kind_of(method, spec).identity(spec, method)
    modules = {*ENTRIES, type(kind_of(method, spec)).__module__}
    modules |= set(SERVED) if spec.backend.served else set()
    modules |= set(SERVER) if spec.backend.url is not None else set()
    modules |= {f"{METERS}.{name}" for name in spec.engine.meters}
    modules |= {PRODUCERS.module(name) for name in _signals(spec, identity) if name in PRODUCERS}
    # Families of the repository are found by name: importing them takes seconds.
    families = {model.adapter for model in (spec.model, identity.draft) if model is not None}
    modules |= {ADAPTERS.module(name) for name in families & set(ADAPTERS.names())}
    own_files = [Path(getfile(ADAPTERS.load(name))) for name in families - set(ADAPTERS.names())]
    files = {module: _module_file(module, root) for module in modules}
    if missing := sorted(module for module in modules if files[module] is None):
        raise LookupError(f"no module {missing[0]} below {root}")
    return [*filter(None, files.values()), *own_files]


def _signals(spec: RunSpec, identity: Identity) -> set[str]:
    """Return the signals that are read in the model, and in the draft."""
    signals: set[str] = set()
    for method in identity.methods:
        signals |= signals_of(method, spec.model.facts)
        reducer = method.reducer if isinstance(method, Decoder) else None
        if identity.draft is not None and reducer is not None:
            signals |= signals_of(reducer, identity.draft.facts)
    return signals


def code_files(entries: Iterable[Path], root: Path = ROOT) -> dict[Path, tuple[str, str]]:
    """Return the entry files and the files below the root that they import, directly or not: each's name and digest.

    A file outside the root may be anywhere: it counts by its name alone.
    """
    files: dict[Path, tuple[str, str]] = {}
    waiting = list(entries)
    while waiting:
        path = waiting.pop()
        if path not in files:
            stat = path.stat()
            files[path], imported = _read(path, stat.st_size, stat.st_mtime_ns, root)
            waiting += imported
    return files


@cache
def _read(
    path: Path, size: int, changed: int, root: Path
) -> tuple[tuple[str, str], tuple[Path, ...]]:
    """Return name and digest of a file, and the files that it imports; size and time identify its content."""
    del size, changed
    content = path.read_bytes()
    names = imports_of(content.decode(errors="replace"))
    files = {
        _module_file(name, root) for name in names if EXCLUDED.keys().isdisjoint(_packages_of(name))
    }
    place = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return (place, sha256(content).hexdigest()), tuple(sorted(filter(None, files)))


def imports_of(text: str) -> set[str]:
    """Return the names that a Python file may import: modules, the packages that contain them, and what they hold."""
    names: set[str] = set()
    for package, imported in IMPORT.findall(FOR_CHECKERS.sub("", text)):
        names |= {f"{package}.{name}".strip(".") for name in ["", *re.findall(r"[\w.]+", imported)]}
    return {part for name in names for part in _packages_of(name)}


@cache
def _module_file(module: str, root: Path) -> Path | None:
    """Return the file of a module below the root; None if there is none."""
    package, *parts = module.split(".")
    if package != "espalier" or not parts or parts[0] not in FOLDERS:
        return None
    place = root.joinpath(*parts)
    paths = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in paths if path.is_file()), None)


def _packages_of(module: str) -> list[str]:
    """Return a module after the packages that contain it."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
