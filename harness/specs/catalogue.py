"""All methods by name, and how one is built from the config. A new method is one file and one config file."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

from espalier.harness.errors import UserError, unknown_name
from espalier.harness.paths import ROOT
from espalier.harness.settings import PLUS, defaults, gather, read_value, setting_hints, table
from espalier.harness.specs.plugins.code_reference import REMEDY, CodeReference, failure
from espalier.methods.base import Method, MethodError
from espalier.methods.composed import Combined

BASES = "TokenReducer, Decoder, CacheCompressor or DenoisingReducer"


def own_method(name: str, reference: CodeReference, taken: Iterable[str]) -> type[Method]:
    """Return a user's class.

    Args:
        name: the method's name in results.
        reference: the place of the class.
        taken: names of the methods of the repository.

    Raises:
        UserError: the class cannot be imported, or breaks the contract; one line.
    """
    value = reference.load("method")
    line = f"method={str(reference)!r}: "
    if not issubclass(value, Method):
        raise UserError(f"{line}{value.__name__} is no method; valid: a subclass of {BASES}")
    hints = inspect.get_annotations(value).values()
    if "__dataclass_fields__" not in vars(value) and any("ClassVar" not in str(h) for h in hints):
        raise UserError(f"{line}{value.__name__} is no dataclass; valid: @dataclass(frozen=True)")
    if inspect.isabstract(value):
        raise UserError(
            f"{line}{value.__name__} lacks {', '.join(sorted(value.__abstractmethods__))}; valid: a class with them"
        )
    for field in fields(value):
        if field.default is MISSING and field.default_factory is MISSING:
            raise UserError(
                f"{line}{value.__name__}.{field.name} has no default; valid: {field.name}: "
                f"{getattr(field.type, '__name__', field.type)} = <value>"
            )
    try:
        setting_hints(value)
    except (NameError, TypeError) as error:
        raise UserError(
            f"{line}the annotations of {value.__name__} cannot be read: {error}; valid: names that the file imports"
        ) from error
    plain_names = {builtin.replace("_", ""): builtin for builtin in taken}
    builtin = plain_names.get(name.replace("_", "").lower())
    if builtin is not None:
        raise UserError(
            f"{line}{name} is the name of method {builtin}; valid: another name, so that results differ in it"
        )
    return value


def defaults_of(method: type[Method]) -> dict[str, object]:
    """Return the default of each hyper-parameter that a config can hold, as plain data."""
    return {name: _plain(value) for name, value in defaults(method).items() if _is_plain(value)}


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


#: Names of this length and more are no file names on some file systems.
LONGEST_NAME = 200


@dataclass(frozen=True)
class MethodCatalogue:
    """The methods that a folder holds: `methods/<name>.py` with `conf/method/<name>.yaml` is the method `<name>`.

    A file without a config of its name (bases, checks) is no method. Nothing is imported before a method is used.

    Attributes:
        package: the folder of the methods, as it is imported.
        root: the folder of the package and `conf`.
    """

    package: str = "espalier.methods"
    root: Path = ROOT

    @property
    def folder(self) -> str:
        """Folder of the package below `root`."""
        return self.package.rpartition(".")[2]

    def names(self) -> tuple[str, ...]:
        """Return all names in alphabetical order."""
        files, configs = (
            {path.stem for path in (self.root / folder).glob(pattern)}
            for folder, pattern in ((self.folder, "*.py"), ("conf/method", "*.yaml"))
        )
        return tuple(sorted(files & configs))

    def load(self, name: str) -> type[Method]:
        """Import and return the class of a method; of two names with a plus between them that of a combination.

        Raises:
            UserError: there is no such method, and the line lists the valid names; or its file defines none or several.
        """
        if name not in self:
            raise unknown_name("method", name, self.names())
        if PLUS in name:
            return Combined
        module = import_module(f"{self.package}.{name}")
        classes = {
            value for value in vars(module).values() if _is_method_of(value, module.__name__)
        }
        if len(classes) != 1:
            class_names = ", ".join(sorted(value.__name__ for value in classes)) or "none"
            raise UserError(
                f"method={name!r}: {self.folder}/{name}.py must define one class of a method; it defines: {class_names}"
            )
        return classes.pop()

    def __contains__(self, name: object) -> bool:
        """Return whether there is a method of this name, or one of each of two with a plus between them."""
        parts = name.split(PLUS) if isinstance(name, str) else ()
        return len(parts) in (1, 2) and all(map(self._is_file, parts))

    def _is_file(self, name: str) -> bool:
        # Called for every cell of a sweep: two look-ups are cheaper than listing both folders.
        places = (f"{self.folder}/{name}.py", f"conf/method/{name}.yaml")
        valid = name.isidentifier() and len(name) < LONGEST_NAME
        return valid and all((self.root / place).is_file() for place in places)


def _is_method_of(value: object, module: str) -> TypeGuard[type[Method]]:
    """Return whether a value of a module is a method defined there; classes named with a leading _ are helpers."""
    return (
        isinstance(value, type)
        and issubclass(value, Method)
        and value.__module__ == module
        and not value.__name__.startswith("_")
    )


METHODS = MethodCatalogue()


def names_of(base: type[object]) -> tuple[str, ...]:
    """Return the names of the methods of one kind, in alphabetical order. Cost: imports all of them.

    Methods that run at every denoising step are a separate kind, although their base is that of methods that run
    once.
    """
    classes = {name: METHODS.load(name) for name in METHODS.names()}
    return tuple(
        name
        for name, method in classes.items()
        if issubclass(method, base)
        and method.in_one_prefill == getattr(base, "in_one_prefill", method.in_one_prefill)
    )


def method_class(name: str, code: str | None = None) -> type[Method]:
    """Return the class of a method: of a file in methods/ by its name, of a user by its place.

    Raises:
        UserError: there is no such method or class, or it breaks the contract of a method.
    """
    if code is None:
        return METHODS.load(name)
    reference = CodeReference.parse(code)
    if reference is None:
        raise UserError(f"method.code={code!r}; valid: {REMEDY}")
    return own_method(name, reference, METHODS.names())


def build_method(name: str, params: Mapping[str, Any], code: str | None = None) -> Method:
    """Return a method with these hyper-parameters; those not given keep the defaults of its class.

    Args:
        name: of the method.
        params: hyper-parameters.
        code: place of a user's class; None: a file in methods/.

    Raises:
        UserError: unknown method, unknown hyper-parameter, wrong type or out of range; one line with the config key
            `method.params.<key>`, the value and what is valid.
    """
    method = method_class(name, code)
    if method is Combined:
        return _combination(name, params)
    hints = setting_hints(method)
    unknown = [key for key in params if key not in hints]
    if unknown:
        raise _unknown_param(name, unknown[0], hints)
    values = gather(
        {key: (f"method.params.{key}", value, hints[key]) for key, value in params.items()}
    )
    try:
        built: Method = method(**values)
    except MethodError as error:
        raise UserError(str(error)) from error
    except BaseException as error:  # a user's class may raise anything
        if code is None or isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(
            f"method={name!r} cannot be built: {failure(error)}; valid: hyper-parameters that its class takes"
        ) from error
    return built


def _combination(name: str, params: Mapping[str, Any]) -> Combined:
    """Return a combination; `params` has the hyper-parameters of each method below its name, beside those of both."""
    names, key = name.split(PLUS), "first_ratio"
    valid = dict.fromkeys((key, *names))
    unknown = [param for param in params if param not in valid]
    if unknown:
        raise _unknown_param(name, unknown[0], valid)
    first, second = (
        _part(part, table(f"method.params.{part}", params.get(part))) for part in names
    )
    hint = setting_hints(Combined)[key]
    ratio = read_value(f"method.params.{key}", params.get(key), hint)
    try:
        return Combined(first, second, ratio)
    except MethodError as error:
        raise UserError(f"method={name!r}: {error}") from error


def _part(name: str, params: Mapping[str, Any]) -> Any:
    """Return one method of a combination; errors name its hyper-parameters below its name."""
    try:
        return build_method(name, params)
    except UserError as error:
        raise UserError(str(error).replace("method.params", f"method.params.{name}")) from error


def _unknown_param(name: str, key: str, types: Mapping[str, Any]) -> UserError:
    if not types:
        return UserError(f"method.params.{key} is unknown; method {name} has no hyper-parameters")
    return unknown_name("method.params", key, types)
