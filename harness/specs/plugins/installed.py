"""Installed plug-ins: packages with an entry point `espalier.plugins` and a folder `conf`.

Such a folder holds files as those of the repository's conf/: `method/spread.yaml` names its class by
`code: package.module:Class`, `model/mine.yaml` its family by `adapter: package.module:Class`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import yaml

from espalier.harness.errors import FOREIGN, first_words
from espalier.harness.paths import package_spec
from espalier.harness.specs.plugins.code_reference import CodeReference

#: The group of entry points.
GROUP = "espalier.plugins"


@dataclass(frozen=True)
class Plugin:
    """An installed package.

    Attributes:
        title: the distribution and its version.
        root: folder of the package; None: there is none.
        problem: why it is passed over; None: it is not.
    """

    title: str
    root: Path | None
    problem: str | None = None

    @property
    def conf(self) -> Path | None:
        """The folder of its configs; None for a plug-in that is passed over."""
        return None if self.root is None or self.problem else self.root / "conf"


# What is installed does not change while a process runs.
@cache
def installed() -> tuple[Plugin, ...]:
    """Return the installed plug-ins by title. Cost: 3 ms for 200 packages; nothing of a plug-in is imported."""
    files = (path for place in sys.path for path in Path(place).glob("*.*-info/entry_points.txt"))
    if not any(map(_names_group, files)):
        return ()
    # Takes 25 ms, which a command without plug-ins need not wait for.
    from importlib.metadata import distributions

    plugins = [plugin for package in distributions() for plugin in _plugins(package)]
    by_root = {plugin.root or plugin.problem: plugin for plugin in reversed(plugins)}
    return tuple(sorted(by_root.values(), key=lambda plugin: plugin.title))


def plugin_at(root: Path) -> Plugin:
    """Return the installed plug-in that a file or folder is in; of other code one with the path as its title."""
    root = root.resolve()
    return next(
        (
            plugin
            for plugin in installed()
            if plugin.root is not None and root.is_relative_to(plugin.root.resolve())
        ),
        Plugin(str(root), root),
    )


def plugins_of(places: Iterable[str | None], tasks: Path | None = None) -> list[Plugin]:
    """Return the code of users that a run consists of.

    Args:
        places: of classes; other names are passed over.
        tasks: folder of the benchmark's task, which may be part of an installed plug-in.
    """
    references = filter(None, map(CodeReference.parse, places))
    plugins = [plugin_at(root) for reference in references if (root := reference.root)]
    if tasks is not None and (plugin := plugin_at(tasks)) in installed():
        plugins.append(plugin)
    return list(dict.fromkeys(plugins))


def _names_group(path: Path) -> bool:
    try:
        return GROUP.encode() in path.read_bytes()
    except FOREIGN:
        return False


def _plugins(package: Distribution) -> list[Plugin]:
    """Return the plug-ins of a package; none if another program has damaged its metadata."""
    try:
        return [_plugin(entry) for entry in package.entry_points.select(group=GROUP)]
    except FOREIGN as error:
        place = str(package.locate_file(""))
        line = f"a package of {place} is passed over: its metadata cannot be read ({first_words(error)})"
        return [Plugin(place, None, f"{line}; valid: UTF-8")]


def conf_folders() -> tuple[Path, ...]:
    """Return the folders of configs of the installed plug-ins."""
    return tuple(plugin.conf for plugin in installed() if plugin.conf is not None)


def title_of(conf: Path) -> str:
    """Return what lines call a folder of configs: the plug-in, or the path."""
    return next((plugin.title for plugin in installed() if plugin.conf == conf), str(conf))


def problems() -> list[str]:
    """Return a line for each plug-in that is passed over."""
    return [plugin.problem for plugin in installed() if plugin.problem is not None]


def adapters() -> list[str]:
    """Return the model families of the installed plug-ins, as their files of `model/` name them."""
    files = [
        path for folder in conf_folders() for path in sorted((folder / "model").glob("*.yaml"))
    ]
    return list(dict.fromkeys(name for path in files for name in _adapters(path)))


def _adapters(path: Path) -> Iterator[str]:
    try:
        section = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FOREIGN:
        return  # its error line appears when its name is used
    reference = CodeReference.parse(section.get("adapter")) if isinstance(section, dict) else None
    if reference is not None:
        yield str(reference.anchored(path.parents[1]))


def _plugin(entry: EntryPoint) -> Plugin:
    assert entry.dist is not None  # entry_points() gives it
    title = f"{entry.dist.name} {entry.dist.version}"
    line = f"plug-in {title} is passed over: its entry point {entry.name} = {entry.value!r}"
    package, *inner = entry.value.split(".")
    spec = package_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return Plugin(title, None, f"{line} names no package; valid: a package with a folder conf")
    root = Path(next(iter(spec.submodule_search_locations)), *inner)
    if not (root / "conf").is_dir():
        return Plugin(
            title, root, f"{line} has no folder {root / 'conf'}; valid: files as in conf/"
        )
    return Plugin(title, root)
