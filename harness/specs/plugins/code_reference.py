"""A user's class: by its place, `path/to/mine.py:MyMethod` or `package.module:MyMethod`, and the code of any class."""

from __future__ import annotations

import dis
import json
import linecache
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
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from uuid import uuid4

from espalier.harness.errors import UserError, brief, tell_once, text_of
from espalier.harness.paths import package_spec

_PATTERN = re.compile(r"(.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")

#: How the modules of files begin; no package has such a name.
_PREFIX = "espalier_file_"

#: Modules that run as a program: nobody imports from them.
PROGRAMS = ("__main__", "__mp_main__")

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

    @property
    def root(self) -> Path | None:
        """The file, or the folder of the module's package, which is not imported; None: there is none."""
        if self.file is not None:
            return self.file if self.file.exists() else None
        spec = package_spec(self.place.partition(".")[0])
        places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
        return None if not places or places[0] is None else Path(places[0])

    def anchored(self, folder: Path) -> CodeReference:
        """Return the reference with an absolute path; a relative one starts at `folder`."""
        if self.file is None:
            return self
        return CodeReference(str((folder / self.file).resolve()), self.name)

    def check(self, key: str) -> None:
        """Raise UserError if there is no such file; nothing is read."""
        if self.file is not None and not os.path.isfile(self.file):
            raise UserError(
                f"{key}={str(self)!r}: {self.file} is not a file; valid: {REMEDY}; relative paths start at the working "
                "directory"
            )

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
            # The module itself, or a package around it.
            if isinstance(error, ModuleNotFoundError) and f"{self.place}.".startswith(
                f"{error.name}."
            ):
                raise UserError(
                    f"{key}={str(self)!r}: there is no module {error.name}; valid: {REMEDY}"
                ) from error
            raise UserError(
                f"{key}={str(self)!r} cannot be imported: {failure(error, self.file)}; valid: code that Python imports"
            ) from error
        value = vars(module).get(self.name)
        if not isinstance(value, type):
            classes = [item for item in vars(module).values() if isinstance(item, type)]
            defined = [item.__name__ for item in classes if item.__module__ == module.__name__]
            raise self._no_class(key, [name for name in defined if not name.startswith("_")])
        return value

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
        names = [name for name in sys.modules if name.startswith(_PREFIX)]
        return cls(tuple((name, str(sys.modules[name].__file__)) for name in names))

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


def own_code(classes: Iterable[type]) -> tuple[list[str], dict[str, Path]]:
    """Return the code of classes: texts of notebook cells and of values, and the file of each module.

    A class that no module holds counts with the cells or scripts that define it and what its functions name. Without
    their source, or with a value that is no plain data, a random text makes the key one of its own: the run is not
    served from the store, which a line reports.
    """
    texts, files, visited = set[str](), dict[str, Path](), dict[int, Any]()
    waiting: list[tuple[str, Any]] = [(part.__name__, part) for part in classes]
    while waiting:
        name, value = waiting.pop()
        if id(value) in visited or isinstance(value, BuiltinFunctionType) or _is_generated(value):
            continue
        visited[id(value)] = value
        module, text = _home(value), _plain(value)
        if module is not None:
            files[module.__name__] = Path(getattr(module, "__file__", None) or "")
            text = ""
        if isinstance(value, type) and module is None:
            parts = list(_functions(value))
            script = getattr(sys.modules.get(value.__module__), "__file__", None)
            text = "" if parts else "".join(linecache.getlines(script or "")) or None
            waiting += [*parts, *((base.__name__, base) for base in value.__bases__)]
        elif isinstance(value, FunctionType) and not _is_held(value):
            if module is None:
                text = "".join(linecache.getlines(value.__code__.co_filename)) or None
            waiting += _values(value, with_globals=module is None)
        if text is None:
            tell_once(
                f"{name} has no source and is no plain data: runs of this method are not "
                "served from the store; valid: a class in a file, and numbers, texts, lists or modules in what it reads"
            )
            text = uuid4().hex
        texts.add(text)
    return sorted(texts), files


def _home(value: Any) -> ModuleType | None:
    """Return the module of a function's code, or the one that holds a class; None: a notebook or a script."""
    if isinstance(value, ModuleType):
        return value
    is_function = isinstance(value, FunctionType)
    name = value.__globals__.get("__name__") if is_function else getattr(value, "__module__", None)
    module = sys.modules.get(name or "")
    is_usable = module is not None and module.__name__ not in PROGRAMS
    return module if is_usable and (is_function or _is_held(value)) else None


def _is_held(value: Any) -> bool:
    """Return whether a class or a function is what its module holds under its name."""
    place: Any = sys.modules.get(value.__module__)
    for name in getattr(value, "__qualname__", "?").split("."):
        place = getattr(place, name, None)
    return place is value and value.__module__ not in PROGRAMS


def _is_generated(value: Any) -> bool:
    """Return whether a dataclass has made a function from its fields."""
    return isinstance(value, FunctionType) and "__create_fn__" in value.__code__.co_qualname


def _functions(part: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of a class by name, those that a dataclass generates left out."""
    for name, item in vars(part).items():
        holders = ("fget", "func", "__func__")
        function = next(
            (getattr(item, holder) for holder in holders if hasattr(item, holder)), item
        )
        if isinstance(function, FunctionType) and not _is_generated(function):
            yield name, function


def _values(function: FunctionType, with_globals: bool) -> Iterator[tuple[str, Any]]:
    """Yield the values outside of a function that it reads: global and captured ones, and defaults."""
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and not with_globals:
        # What a decorator of a library captures beside it is the library's.
        yield function.__name__, wrapped
        return
    yield "defaults", [function.__defaults__, function.__kwdefaults__]
    captured = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in captured if name != "__class__")
    if with_globals:
        names = set(_read_names(function.__code__)) & function.__globals__.keys()
        yield from ((name, function.__globals__[name]) for name in names)


def _read_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that code reads; names of attributes are none."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read_names(constant)


def _plain(value: Any) -> str | None:
    """Return plain data as text; None for another value."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda items: sorted(items, key=repr))
    except (TypeError, ValueError):  # ValueError: it contains itself
        return None
