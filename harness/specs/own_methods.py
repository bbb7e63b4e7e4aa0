"""The contract of a user's method, checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import MISSING, fields

from espalier.harness.errors import UserError
from espalier.harness.settings import defaults, setting_hints
from espalier.harness.specs.plugins.code_reference import CodeReference
from espalier.methods.base import Method

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
        missing = ", ".join(sorted(value.__abstractmethods__))
        raise UserError(f"{line}{value.__name__} lacks {missing}; valid: a class with them")
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
    values = defaults(method)
    return {name: _plain(value) for name, value in values.items() if _is_plain(value)}


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
