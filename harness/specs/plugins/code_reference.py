"""A user's class by its place: `path/to/mine.py:MyMethod` or `package.module:MyMethod`."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from espalier.harness.errors import FOREIGN, UserError, brief, text_of

_PATTERN = re.compile(r"(.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")

#: How the modules of files begin; no package has such a name.
_PREFIX = "espalier_file_"

REMEDY = "<file>.py:<class>, or <package>.<module>:<class> of an installed package"


@dataclass(frozen=True)
class CodeReference:
    """The place of a class.

    Attributes:
        place: a file that ends in `.py`, or a module.
        name: the class.
    """

    place: str
    name: str

    @classmethod
    def parse(cls, text: object) -> CodeReference | None:
        """Return the reference that a text is; None: it is another name."""
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        return match and cls(*match.groups())

    def __str__(self) -> str:
        """Return the text."""
        return f"{self.place}:{self.name}"

    @property
    def file(self) -> Path | None:
        """The file; relative paths start at the working directory. None for a module."""
        return Path(os.path.expanduser(self.place)) if self.place.endswith(".py") else None

    def anchored(self, folder: Path) -> CodeReference:
        """Return the reference with an absolute path; a relative one starts at `folder`."""
        if self.file is None:
            return self
        return CodeReference(str((folder / self.file).resolve()), self.name)

    def check(self, key: str) -> None:
        """Raise UserError if the file is missing, is no Python or has no such class. Cost: one parse; runs nothing."""
        if self.file is None:
            return
        if not os.path.isfile(self.file):
            raise UserError(
                f"{key}={str(self)!r}: {self.file} is not a file; valid: {REMEDY}; relative paths start at the working "
                "directory"
            )
        try:
            tree = ast.parse(self.file.read_bytes(), str(self.file))
        except FOREIGN as error:
            raise self._failed(key, error) from error
        names = set(_names(tree))
        if self.name not in names and "*" not in names:
            classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
            raise self._no_class(key, classes)

    def load(self, key: str) -> type:
        """Import the module, and return the class.

        Raises:
            UserError: there is no such module or class, or the module fails; one line with its file and line.
        """
        self.check(key)
        try:
            module = import_module(self.place) if self.file is None else _module_of(self.file)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's file may raise anything
            if isinstance(error, ModuleNotFoundError) and _lies_in(self.place, error.name):
                raise UserError(
                    f"{key}={str(self)!r}: there is no module {error.name}; valid: {REMEDY}"
                ) from error
            raise self._failed(key, error) from error
        value = vars(module).get(self.name)
        if not isinstance(value, type):
            classes = [name for name, item in vars(module).items() if isinstance(item, type)]
            raise self._no_class(key, [name for name in classes if not name.startswith("_")])
        return value

    def _failed(self, key: str, error: BaseException) -> UserError:
        return UserError(
            f"{key}={str(self)!r} cannot be imported: {failure(error, self.file)}; valid: code that Python imports"
        )

    def _no_class(self, key: str, classes: Iterable[str]) -> UserError:
        valid = ", ".join(f"{self.place}:{name}" for name in sorted(classes)) or REMEDY
        return UserError(
            f"{key}={str(self)!r}: {self.place} has no class {self.name}; valid: {valid}"
        )


def failure(error: BaseException, file: Path | None = None) -> str:
    """Return an error of a user's code in one line, with its last place in `file`, or of all."""
    if isinstance(error, SyntaxError):
        place, reason = f"{error.filename or file}:{error.lineno or 1}", error.msg
    else:
        path = None if file is None else str(file.resolve())
        frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename[0] != "<"]
        last = ([frame for frame in frames if frame.filename == path] or frames)[-1]
        place, reason = f"{last.filename}:{last.lineno}", text_of(error)
    words = " ".join(f"{type(error).__name__}: {reason}".split()).removesuffix(":")
    return f"{brief(words)} ({place})"


@dataclass(frozen=True)
class ImportedFiles:
    """The files that this process has imported as modules.

    In front of other objects in a pickle it lets another process find their classes.
    """

    files: tuple[tuple[str, str], ...]

    @classmethod
    def of_process(cls) -> ImportedFiles:
        """Return those of this process, each with the name of its module."""
        modules = [(name, sys.modules[name]) for name in sys.modules if name.startswith(_PREFIX)]
        return cls(tuple((name, str(module.__file__)) for name, module in modules))

    def __setstate__(self, state: dict[str, tuple[tuple[str, str], ...]]) -> None:
        """Import the files in the process that reads the pickle."""
        for name, path in state["files"]:
            _import_file(name, Path(path))
        vars(self).update(state)


def _module_of(path: Path) -> ModuleType:
    """Return the module of a file, imported again if the file has changed."""
    path, stat = path.resolve(), path.stat()
    stamp = f"{path} {stat.st_size} {stat.st_mtime_ns}"
    return _import_file(f"{_PREFIX}{path.stem}_{sha256(stamp.encode()).hexdigest()[:12]}", path)


def _import_file(name: str, path: Path) -> ModuleType:
    """Return a file's module; Python needs it in its table for dataclasses and pickles."""
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines or imports anywhere; `*` if it imports all of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _lies_in(place: str, module: str | None) -> bool:
    """Return whether a module is the one of a place, or a package around it."""
    return module is not None and f"{place}.".startswith(f"{module}.")
