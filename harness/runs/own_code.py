"""The code of a method that no file holds under its name: a class of a notebook, a script or a function.

The digest covers the compiled code of the class and of its bases, of every function and class that they use and that no
module holds either, and the values of the names that they read. Comments, docstrings and annotations of functions do
not count: none of them runs. Code of importable modules counts by its file.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field
from enum import Enum
from functools import cached_property, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT

#: Modules that run as a program: nobody imports from them.
PROGRAMS = ("__main__", "__mp_main__")

#: Folders that package managers install into.
LIBRARY_FOLDERS = frozenset(["site-packages", "dist-packages"])

#: Entries of a class that state where it is defined, or that dataclasses and ABC derive from the others.
DERIVED = frozenset(
    [
        *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "_abc_impl"),
        *("__annotate__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__"),
        *("__dataclass_fields__", "__dataclass_params__", "__match_args__"),
        *("__firstlineno__", "__static_attributes__", "__replace__"),
    ]
)

#: Values that their text describes completely.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...)),
    *(GenericAlias, UnionType, torch.dtype, torch.device),
)

#: Functions and descriptors that are not written in Python.
BUILTINS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType)


@dataclass(frozen=True)
class OwnCode:
    """The code of a class.

    Attributes:
        digest: SHA-256 of the code that no module holds.
        modules: modules that it uses, libraries left out.
    """

    digest: str
    modules: frozenset[str]


def is_importable(value: Any) -> bool:
    """Return whether a class or a function is what its module holds under its name."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or value.__module__ in PROGRAMS:
        return False
    place: Any = module
    for name in value.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is value


def own_code(method_class: type) -> OwnCode:
    """Return the code of a class that is not importable.

    Raises:
        UserError: the class reads a value that has no digest, such as a model; the line has its name.
    """
    walk = _CodeWalk(method_class.__name__)
    walk.add(method_class.__name__, method_class)
    return OwnCode(sha256("\n".join(walk.text).encode()).hexdigest(), frozenset(walk.modules))


@dataclass
class _CodeWalk:
    """Writes everything that a class runs as text."""

    method: str
    text: list[str] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    visited: dict[int, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Write a value under the name by which the code reads it."""
        if isinstance(value, PLAIN) or type(value).__module__ == "typing":
            self.text.append(f"{name}={value!r}")
            return
        if id(value) in self.visited:
            self.text.append(f"{name}=visited")
            return
        self.text.append(f"{name}:{type(value).__name__}")
        if not isinstance(value, tuple | frozenset):
            # The value is kept alive, so that no other value gets its number.
            self.visited[id(value)] = value
        for kind, write in WRITERS:
            if isinstance(value, kind):
                write(self, name, value)
                return
        if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
            raise UserError(
                f"method {self.method}: {name} is a {type(value).__name__}, which the run key cannot hold; valid: a "
                "number, a text or a tensor, a hyper-parameter, or a module of your own that the code imports"
            )
        self.add(f"{name} class", type(value))
        self.table(name, vars(value))

    def module(self, name: str, value: ModuleType) -> None:
        self.library(value.__name__)

    def library(self, module: str) -> None:
        """Write the name of a module and the version of its package, and note one that is no library."""
        path = source_file(module)
        if path is not None:
            self.modules.add(module)
        package = sys.modules.get(module.partition(".")[0])
        version = "" if path is not None else getattr(package, "__version__", "")
        self.text.append(f"module {module} {version}")

    def class_(self, name: str, value: type) -> None:
        if is_importable(value) or _is_of_library(value.__module__):
            self.text.append(value.__qualname__)
            self.library(value.__module__)
            return
        for base in value.__bases__:
            self.add(f"{name} base {base.__name__}", base)
        for entry, attribute in vars(value).items():
            if entry not in DERIVED and not _is_generated(attribute):
                self.add(f"{name}.{entry}", attribute)
        for hyper_parameter in getattr(value, "__dataclass_fields__", {}).values():
            self.field(f"{name}.{hyper_parameter.name}", hyper_parameter)

    def field(self, name: str, value: Field[Any]) -> None:
        self.text.append(f"{name} {value.type} {value.init}")
        for part in (value.default, value.default_factory):
            if part is not MISSING:
                self.add(name, part)

    def function(self, name: str, value: FunctionType) -> None:
        if is_importable(value):
            self.text.append(value.__qualname__)
            self.library(value.__module__)
            return
        # A decorator's function has the name and the module of the one that it wraps, and its own globals.
        module = value.__globals__.get("__name__")
        is_of_library = _is_of_library(module)
        if is_of_library:
            self.text.append(value.__code__.co_qualname)
            self.library(str(module))
        else:
            self.code(name, value.__code__, value.__doc__)
        self.add(f"{name} defaults", value.__defaults__)
        self.add(f"{name} defaults", value.__kwdefaults__)
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if variable != "__class__":  # for super(); the class itself is being written
                self.add(variable, cell.cell_contents)
        if is_of_library:
            return
        for variable in sorted(set(_global_names(value.__code__))):
            if variable in value.__globals__:
                self.add(variable, value.__globals__[variable])
        for imported in sorted(set(_imports(value.__code__))):
            with suppress(ImportError):
                import_module(imported)
            self.library(imported)

    def code(self, name: str, code: CodeType, documentation: str | None = None) -> None:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        self.text.append(
            f"{name} {counts} {names} {code.co_code.hex()} {code.co_exceptiontable.hex()}"
        )
        for number, constant in enumerate(code.co_consts):
            if isinstance(constant, CodeType):
                self.code(f"{name} {constant.co_name}", constant)
            elif number or documentation is None or constant != documentation:
                self.add(f"{name} {number}", constant)

    def items(self, name: str, value: Any) -> None:
        for number, item in enumerate(value):
            self.add(f"{name}[{number}]", item)

    def unordered(self, name: str, value: Any) -> None:
        self.items(name, sorted(value, key=repr))

    def table(self, name: str, value: Mapping[Any, Any]) -> None:
        for key, item in value.items():
            self.add(f"{name}[{key!r}]", item)

    def array(self, name: str, value: Any) -> None:
        plain = np.ascontiguousarray(
            value.detach().cpu().contiguous().view(torch.uint8).numpy()
            if isinstance(value, torch.Tensor) and value.ndim
            else np.asarray(value)
        )
        if plain.dtype.hasobject:
            self.items(name, plain.tolist())
            return
        content = sha256(plain.tobytes()).hexdigest()
        self.text.append(f"{name} {getattr(value, 'dtype', '')} {tuple(value.shape)} {content}")

    def wrapped(self, name: str, value: Any) -> None:
        self.add(name, value.__func__)

    def property_(self, name: str, value: property) -> None:
        for accessor in (value.fget, value.fset, value.fdel):
            self.add(name, accessor)

    def cached(self, name: str, value: cached_property[Any]) -> None:
        self.add(name, value.func)

    def partial_(self, name: str, value: partial[Any]) -> None:
        for part in (value.func, value.args, value.keywords):
            self.add(name, part)

    def choice(self, name: str, value: Enum) -> None:
        self.text.append(f"{name} {value.name}")
        self.add(name, type(value))

    def builtin(self, name: str, value: Any) -> None:
        self.text.append(f"{name} {getattr(value, '__module__', '')} {value.__qualname__}")


#: How a value is written, by its type; the first that fits counts.
WRITERS: tuple[tuple[Any, Any], ...] = (
    (ModuleType, _CodeWalk.module),
    (Enum, _CodeWalk.choice),
    (type, _CodeWalk.class_),
    (FunctionType, _CodeWalk.function),
    (BUILTINS, _CodeWalk.builtin),
    ((staticmethod, classmethod), _CodeWalk.wrapped),
    (property, _CodeWalk.property_),
    (cached_property, _CodeWalk.cached),
    (partial, _CodeWalk.partial_),
    ((torch.Tensor, np.ndarray, np.generic), _CodeWalk.array),
    ((set, frozenset), _CodeWalk.unordered),
    (Mapping, _CodeWalk.table),
    ((list, tuple), _CodeWalk.items),
)


def source_file(module: str) -> Path | None:
    """Return the file of a module of the user or of the harness; None for a library, which counts by its version."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module in PROGRAMS or module.partition(".")[0] in sys.stdlib_module_names:
        return None
    path = Path(file)
    place = path.resolve()
    # An environment may lie in the checkout, and an installed package lies in an environment.
    folders = place.relative_to(ROOT) if place.is_relative_to(ROOT) else place
    is_library = not LIBRARY_FOLDERS.isdisjoint(folders.parts)
    return None if is_library or path.suffix != ".py" else path


def _is_of_library(module: str | None) -> bool:
    return module in sys.modules and module not in PROGRAMS and source_file(module) is None


def _is_generated(value: Any) -> bool:
    """Return whether a dataclass has made a function from its fields."""
    return isinstance(value, FunctionType) and "__create_fn__" in value.__code__.co_qualname


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _global_names(code: CodeType) -> Iterator[str]:
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield str(instruction.argval)


def _imports(code: CodeType) -> Iterator[str]:
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME" and instruction.argval:
                yield str(instruction.argval)
