"""Settings are declared once: a frozen dataclass holds a section's fields, and one reader checks a config against it.

The annotation of a field is its declaration. `int`, `bool`, `Literal["a", "b"]`, `tuple[str, ...]`, `X | None`, `Path`
and other dataclasses are checked as they are; `Annotated` adds a range (`Must`), a list of names (`OneOf`) or a reader
of the field's own (`By`). The hyper-parameters of methods are read in the same way from their annotations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from espalier.harness.errors import UserError, UserErrors, near_key, steers, unknown_name
from espalier.harness.paths import located

Name = TypeVar("Name", bound=str)
Section = TypeVar("Section")

#: Between the names of two methods on one prompt.
PLUS = "+"

#: Returns a value in its final type, given the config key and the value as it is in the config.
Reader = Callable[[str, Any], Any]

#: The same for a value of an annotated type, as `read_value`.
ValueReader = Callable[[str, Any, Any], Any]

#: `field(metadata=COMPUTED)`: the program fills in this field of a section, the config does not have it.
COMPUTED: Mapping[str, Any] = {"computed": True}

#: `field(metadata=OMITTED)`: rows do not have the setting; it changes no number, or they have what follows from it.
#: Every other field of a section is in rows and run keys, and is compared (harness/specs/row_settings.py).
OMITTED: Mapping[str, Any] = {"omitted": True}

#: `field(metadata=COST)`: changes costs or records of a run, and no answer.
COST: Mapping[str, Any] = {"cost": True}

#: `field(metadata=OPEN)`: published tables leave it open unless a cell sets it: precision, kernels, devices, what
#: follows from the model or the benchmark, and what tables have options of their own for.
OPEN: Mapping[str, Any] = {"open": True}

#: `field(metadata=STATED)`: every row has it, at its default, too, as it has fields without a default; a row without
#: it is of an earlier version. A row without any other setting has its default.
STATED: Mapping[str, Any] = {"stated": True}

#: `field(metadata=BY_METHOD)`: as `STATED`, and null where the setting does not change the numbers of the row's method
#: (`Identity` in harness/kinds/kind.py).
BY_METHOD: Mapping[str, Any] = {**STATED, "by_method": True}

#: `field(metadata=ANY_ENGINE)`: other engines have the setting too, or it does not concern them; they refuse values off
#: the default of any other engine setting.
ANY_ENGINE: Mapping[str, Any] = {"any_engine": True}

#: Bytes of the units of a size.
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


@dataclass(frozen=True)
class Must:
    """A condition; `be` follows `must be` in an error line, also where the value is of another type."""

    be: str
    holds: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True)
class OneOf:
    """The names that a value can have."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class By:
    """A reader that replaces that of the annotated type and raises its own UserError."""

    read: Reader


class _Mismatch(Exception):
    """A value is not of the annotated type; the message follows `must be` in the error line."""


def read_value(key: str, value: Any, hint: Any) -> Any:
    """Return a value in the annotated type: integers pass as floats, lists become tuples, texts become paths.

    Raises:
        UserError: one line with the key, the value and what is valid.
    """
    try:
        return _reader(hint)(key, value)
    except _Mismatch as mismatch:
        raise UserError(f"{key}={value!r} must be {mismatch}") from None


def shared_reader() -> ValueReader:
    """Return a `read_value` that reads a table once: the cells of a command share equal sections."""
    tables: dict[tuple[str, int], tuple[Any, Any]] = {}

    def read(key: str, value: Any, hint: Any) -> Any:
        if not isinstance(value, dict):
            return read_value(key, value, hint)
        place = key, id(value)
        if place not in tables:
            # The table stays with its result: no other one can get its id.
            tables[place] = value, read_value(key, value, hint)
        return tables[place][1]

    return read


def read_section(
    section: type[Section], key: str, part: Any, read: ValueReader = read_value
) -> Section:
    """Return a table of the config as its dataclass.

    Raises:
        UserError: as `read_fields`, or what the dataclass raises when its fields contradict each other.
    """
    return section(**read_fields(section, key, part, read=read))


def read_fields(
    section: type,
    key: str,
    part: Any,
    mistakes: Iterable[str] = (),
    read: ValueReader = read_value,
) -> dict[str, Any]:
    """Return the values of a table of the config, by the fields of the section's dataclass.

    Args:
        section: the dataclass; the table has every field of it that is not `COMPUTED`.
        key: the config key of the table, "" at the top.
        part: the table.
        mistakes: further error lines about the table.
        read: reads the value of a field.

    Raises:
        UserError: one line with every key that is unknown, missing or has a wrong value.
    """
    values, declared = table(key, part), setting_hints(section)
    present = {name: hint for name, hint in declared.items() if name in values}
    return gather(
        {name: (_dotted(key, name), values[name], hint) for name, hint in present.items()},
        [*key_mistakes(key, values, declared), *mistakes],
        read,
    )


def gather(
    values: Mapping[str, tuple[str, Any, Any]],
    mistakes: Iterable[str] = (),
    read: ValueReader = read_value,
) -> dict[str, Any]:
    """Return what `read` makes of each entry (key, value, annotation).

    Raises:
        Mistakes: values are wrong, or there are `mistakes` already; one line names all of them.
    """
    results: dict[str, Any] = {}
    lines = list(mistakes)
    for name, entry in values.items():
        try:
            results[name] = read(*entry)
        except UserErrors as error:
            lines += error.lines
        except UserError as error:
            lines.append(str(error))
    if lines:
        raise UserErrors(lines)
    return results


@cache
def setting_hints(section: type) -> dict[str, Any]:
    """Return the annotation of each field that the config sets."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in _fields(section)}


def defaults(section: type) -> dict[str, Any]:
    """Return the default of each setting that has one, for tables that need not be complete."""
    values = {field.name: default(field) for field in _fields(section)}
    return {name: value for name, value in values.items() if value is not MISSING}


def default(field: Field[Any]) -> Any:
    """Return the default of a field; MISSING if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def marked(section: type, *marks: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a section that have one of the marks."""
    return tuple(
        field.name
        for field in fields(section)
        if any(mark.keys() <= field.metadata.keys() for mark in marks)
    )


def _fields(section: Any) -> list[Field[Any]]:
    return [field for field in fields(section) if field.init and not field.metadata.get("computed")]


def _located(key: str, value: Any) -> Path:
    text = _reader(Text)(key, value)
    try:
        return located(text)
    except UserError as error:
        raise UserError(f"{key}={error}") from error


@cache
def _reader(hint: Any) -> Reader:
    """Return the reader of an annotation; it raises _Mismatch or UserError."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated_reader(*args)
    if origin in (Union, UnionType):
        return _union_reader(args)
    if origin is Literal:
        return _checked(_words(hint), lambda value: _among(value, args))
    if origin is tuple or origin is frozenset:
        return _list_reader(origin, args[0])
    if origin is not None and issubclass(origin, Mapping):
        return _table_reader(args[1])
    if hint is Any:
        return lambda key, value: value
    if hint is Path:
        return _located
    if is_dataclass(hint):
        return lambda key, value: read_section(hint, key, value)  # type: ignore[arg-type]
    if hint is float:
        return _read_number
    # True is an int for Python, but not for a reader of the config.
    return _checked(
        _words(hint),
        lambda value: isinstance(value, hint) and (hint is bool) == isinstance(value, bool),
    )


def _annotated_reader(hint: Any, *marks: Any) -> Reader:
    readers = [mark.read for mark in marks if isinstance(mark, By)]
    names = [name for mark in marks if isinstance(mark, OneOf) for name in mark.names]
    conditions = [mark for mark in marks if isinstance(mark, Must)]
    read = readers[0] if readers else _reader(hint)

    def checked(key: str, value: Any) -> Any:
        if names:
            return choice(key, value, names)
        try:
            result = read(key, value)
        except _Mismatch:
            if conditions:
                raise _Mismatch(conditions[0].be) from None
            raise
        for condition in conditions:
            if not condition.holds(result):
                raise _Mismatch(condition.be)
        return result

    return checked


def _union_reader(members: tuple[Any, ...]) -> Reader:
    exact = [value for hint in members for value in _exact_values(hint)]
    other_hints = [hint for hint in members if not _exact_values(hint)]
    # A range ends in a comma: "an integer of at least 0, or null".
    separator = ", or " if any(get_origin(hint) is Annotated for hint in members) else " or "

    def read(key: str, value: Any) -> Any:
        if _among(value, exact):
            return value
        words = {hint: _words(hint) for hint in members}
        for hint in other_hints:
            try:
                return _reader(hint)(key, value)
            except _Mismatch as mismatch:
                words[hint] = str(mismatch)
        raise _Mismatch(separator.join(words.values()))

    return read


def _exact_values(hint: Any) -> tuple[Any, ...]:
    if hint is NoneType:
        return (None,)
    return get_args(hint) if get_origin(hint) is Literal else ()


def _among(value: Any, values: Iterable[Any]) -> bool:
    # 1 == True, but they are different settings.
    return any(type(value) is type(valid) and value == valid for valid in values)


def _list_reader(collection: type, hint: Any) -> Reader:
    def read(key: str, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _Mismatch(f"a list, each item {_words(hint)}")
        # The error line gives an unknown name, but not its position in the list.
        keys = (key if _is_named(hint) else f"{key}[{index}]" for index in range(len(value)))
        return collection(read_value(*entry, hint) for entry in zip(keys, value, strict=True))

    return read


def _is_named(hint: Any) -> bool:
    return any(isinstance(mark, OneOf) for mark in get_args(hint))


def _table_reader(hint: Any) -> Reader:
    def read(key: str, value: Any) -> dict[str, Any]:
        entries = table(key, value)
        return gather({name: (f"{key}.{name}", item, hint) for name, item in entries.items()})

    return read if hint is not Any else table


def _checked(words: str, holds: Callable[[Any], bool]) -> Reader:
    def read(key: str, value: Any) -> Any:
        if not holds(value):
            raise _Mismatch(words)
        return value

    return read


def _read_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Mismatch("a number")
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise _Mismatch("a number") from None


def _words(hint: Any) -> str:
    """Return the words that follow `must be` where a value is not of the annotated type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        words = (mark.be for mark in args[1:] if isinstance(mark, Must))
        return next(words, "a name" if _is_named(hint) else _words(args[0]))
    if origin is Literal:
        return str(args[0]) if len(args) == 1 else f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return f"a list, each item {_words(args[0])}"
    if origin in (Union, UnionType):
        return " or ".join(map(_words, args))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    names |= {NoneType: "null", Path: "a path"}
    return names.get(hint, f"a {getattr(hint, '__name__', hint)}")


def choice(key: str, value: Any, valid: Iterable[Name]) -> Name:
    """Return the name of `valid` that `value` is.

    Raises:
        UserError: it is none of them.
    """
    names = tuple(valid)
    if value not in names:
        raise unknown_name(key, str(value), names)
    return names[names.index(value)]


def table(key: str, value: Any) -> dict[str, Any]:
    """Return `value` as a dictionary with string keys; None is the empty one.

    Raises:
        UserError: it is not a table.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{key}={value!r} must be a table of key: value pairs")
    return {str(name): item for name, item in value.items()}


def check_keys(key: str, keys: Iterable[str], valid: Iterable[str]) -> None:
    """Raise UserError unless every key of a table is valid; keys may be missing."""
    names = set(valid)
    for name in keys:
        choice(_dotted(key, "setting"), name, names)


def key_mistakes(key: str, names_in_file: Iterable[str], valid: Iterable[str]) -> list[str]:
    """Return a line for each key of a table that is unknown or missing; the last unknown one lists the valid keys."""
    names, keys = sorted(valid), list(names_in_file)
    unknown = [name for name in keys if name not in names]
    lines = [f"{_dotted(key, name)} is not a config key{_hint(name, names)}" for name in unknown]
    if unknown:
        lines.append(f"valid: {', '.join(_dotted(key, name) for name in names)}")
    missing = [name for name in names if name not in keys]
    return [*lines, *(f"config key {_dotted(key, name)} is missing" for name in missing)]


def unknown_key(key: str, valid: Iterable[str], elsewhere: Sequence[str] = ()) -> UserError:
    """Return the error for a config key that does not exist: the key, the nearest and all valid ones of its table.

    Args:
        key: as it was set.
        valid: the keys of its table.
        elsewhere: keys of other tables that end in this one.
    """
    keys = sorted(valid)
    valid_keys = ", ".join(keys) or f"without {key}"
    hint = f" (did you mean {' or '.join(elsewhere)}?)" if elsewhere else _hint(key, keys)
    return UserError(f"{key} is not a config key{hint}; valid: {valid_keys}")


def _hint(key: str, valid: list[str]) -> str:
    near = near_key(key, valid)
    return f" (did you mean {near}?)" if near else ""


def _dotted(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def at_least(minimum: int) -> Must:
    """Return the condition of an integer that has a minimum."""
    return Must(f"an integer of at least {minimum}", lambda value: value >= minimum)


def at_most(maximum: int) -> Must:
    """Return the condition of an integer that has a maximum."""
    return Must(f"at most {maximum}", lambda value: value <= maximum)


def _share(end: str, words: str) -> Must:
    """Return the condition of a number from 0 to 1; `end` is `)` where 1 itself is not valid."""
    return Must(
        f"a number in [0, 1{end}: {words}",
        lambda value: 0 <= value < 1 or (end == "]" and value == 1),
    )


def _read_size(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _Mismatch(f"a size: bytes, or a number with one of {', '.join(UNITS)}")
    return int(float(match[1]) * UNITS[match[2]])


def _read_memory(key: str, value: Any) -> int:
    size = _read_size(key, value)
    if not size:
        raise _Mismatch("a size above 0")
    return size


Text = Annotated[str, Must("a non-empty string", bool)]
#: A text that cannot become several lines of a script.
Line = Annotated[Text, Must("one line without control characters", lambda value: not steers(value))]
Names = Annotated[tuple[Text, ...], Must("a list of names")]
SomeNames = Annotated[tuple[Text, ...], Must("a non-empty list of names", bool)]
Natural = Annotated[int, at_least(0)]
Count = Annotated[int, at_least(1)]
Positive = Annotated[float, Must("a number above 0", lambda value: 0 < value < math.inf)]
FromZero = Annotated[float, Must("a number of at least 0", lambda value: 0 <= value < math.inf)]
#: Bytes, or a number with its unit: `70GiB`.
Size = Annotated[int, By(_read_size)]
Memory = Annotated[int, By(_read_memory)]
FlagOrAuto = Annotated[bool | Literal["auto"], Must("true, false or auto")]
Ratio = Annotated[float, _share(")", "the share of visual tokens removed")]
CacheRatio = Annotated[float, _share(")", "the share of cache entries evicted")]
#: Only a draft can do without every visual token.
DraftRatio = Annotated[float, _share("]", "the share of visual tokens the draft does without")]
