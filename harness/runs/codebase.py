"""The Python files of the packages that a run may go through, each parsed once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from espalier.harness.runs.code_source import Source, parse
from espalier.harness.runs.normal_code import digest_of

#: Path, size and time of change, which stand for the content of a file.
Stamp = tuple[Path, int, int]


@dataclass
class Codebase:
    """The Python packages below a folder. Files are parsed once, and again when they have changed.

    Args:
        root: the folder.
        packages: names of the packages.
    """

    root: Path
    packages: frozenset[str] = frozenset({"espalier"})
    _sources: dict[Stamp, Source] = field(default_factory=dict)
    _texts: dict[Stamp, str | None] = field(default_factory=dict)

    def keys(self, table: str) -> frozenset[str]:
        """Return the keys of a table `module:NAME`: of a dict, or of statements `NAME.add("key", ...)`."""
        module, _, name = table.partition(":")
        path = self.path(module)
        found = None if path is None else stamp(path)
        if found is None:
            return frozenset()
        source = self.source(found, module)
        return frozenset({**source.items.get(name, {}), **source.entries.get(name, {})})

    def text(self, path: Path) -> str | None:
        """Return the digest of a file's code; None of a file that is no Python. Cost: one parse, once."""
        found = stamp(path) if path.suffix == ".py" else None
        if found is None:
            return None
        if found not in self._texts:
            try:
                self._texts[found] = digest_of(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):  # a task that does not run is not for a key to refuse
                self._texts[found] = None
        return self._texts[found]

    def path(self, module: str) -> Path | None:
        """Return the file of a module of the packages, None if there is none."""
        if module.partition(".")[0] not in self.packages:
            return None
        place = self.root.joinpath(*module.split("."))
        paths = (place.with_suffix(".py"), place / "__init__.py")
        return next((path for path in paths if path.is_file()), None)

    def source(self, found: Stamp, module: str) -> Source:
        """Return what a module's file holds. Cost: one parse, once."""
        if found not in self._sources:
            path = found[0]
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            self._sources[found] = parse(path.read_text(encoding="utf-8"), package)
        return self._sources[found]


def stamp(path: Path) -> Stamp | None:
    """Return what stands for the content of a file, None if there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return path, stat.st_size, stat.st_mtime_ns
