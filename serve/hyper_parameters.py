"""Values of hyper-parameters from JSON, checked against the annotations of a method's class."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from espalier.methods.base import Method

#: How an error line names a type.
WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
}


@cache
def annotations_of(kind: type[Method]) -> dict[str, Any]:
    """Return the annotation of each field of a method's class."""
    return get_type_hints(kind)


def typed(value: Any, hint: Any) -> Any:
    """Return a value in its annotated type: lists become tuples, and integers pass as numbers.

    Raises:
        TypeError: it is of another type; the message is what is valid.
    """
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for member in members:
            try:
                return typed(value, member)
            except TypeError:
                continue
    elif origin is Literal:
        if any(type(value) is type(name) and value == name for name in members):
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(typed(entry, members[0]) for entry in value)
    elif hint is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    elif type(value) is hint:
        return value
    raise TypeError(words(hint))


def words(hint: Any) -> str:
    """Return what an error line says of an annotation."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(words, members))
    if origin is Literal:
        return ", ".join(map(str, members))
    if origin is tuple:
        return f"a list, each item {words(members[0])}"
    return WORDS[hint] if hint is None or hint in WORDS else f"a {hint.__name__}"
