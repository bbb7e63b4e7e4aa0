"""The code of users that a run imports: its files for the run key, and its names for the row."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import getfile
from pathlib import Path

from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.harness.specs.plugins.installed import installed
from espalier.harness.specs.run_spec import RunSpec


@dataclass(frozen=True)
class PluginCode:
    """A user's code.

    Attributes:
        title: the installed distribution and its version, else the path.
        root: the file, or the folder of the package.
    """

    title: str
    root: Path


def plugins_of(spec: RunSpec) -> list[PluginCode]:
    """Return the users' code that defines a run's method, compressor, model families and benchmark."""
    return _named(_roots(spec))


def plugin_at(reference: CodeReference) -> PluginCode | None:
    """Return the code in the place of a class, which is not imported; None: nothing is there."""
    root = reference.file or _package(reference.place.partition(".")[0])
    return None if root is None or not root.exists() else _named([root])[0]


def _package(name: str) -> Path | None:
    """Return the folder of a package, or the file of a module; None: there is none."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    return None if not places or places[0] is None else Path(places[0])


def _named(roots: Iterable[Path]) -> list[PluginCode]:
    """Return code by its files or packages; what lies inside an installed plug-in is the plug-in's."""
    resolved = dict.fromkeys(root.resolve() for root in roots)
    titles = {plugin.root.resolve(): plugin.title for plugin in installed() if plugin.root}
    inside = [next((top for top in titles if root.is_relative_to(top)), root) for root in resolved]
    return [PluginCode(titles.get(root, str(root)), root) for root in dict.fromkeys(inside)]


def _roots(spec: RunSpec) -> Iterator[Path]:
    """Yield the file or the package of each class that the run names by its place, and an installed benchmark."""
    parts, models = (spec.method, spec.method.compressor), (spec.model, spec.method.draft)
    places = [*(part.code for part in parts if part), *(model.adapter for model in models if model)]
    for reference in filter(None, map(CodeReference.parse, places)):
        yield _root_of(reference.load("method.code"))
    tasks = spec.benchmark.include_path
    if tasks is not None:
        yield from (
            p.root for p in installed() if p.root and tasks.is_relative_to(p.root.resolve())
        )


def _root_of(value: type) -> Path:
    package = sys.modules[value.__module__.partition(".")[0]]
    file = Path(getfile(value))
    folders = map(Path, getattr(package, "__path__", ()))
    return next((folder for folder in folders if file.is_relative_to(folder)), file)
