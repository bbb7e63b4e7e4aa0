"""Checks of single config values: each returns the value in its final type or raises one UserError line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from espalier.harness.errors import Mistakes, UserError, near_names, steers, unknown_name

Name = TypeVar("Name", bound=str)

#: Bytes of the units in which sizes may be given.
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


def choice(key: str, value: Any, valid: Iterable[Name]) -> Name:
    """Return the one of `valid` that `value` is."""
    names = tuple(valid)
    if value not in names:
        raise unknown_name(key, str(value), names)
    return names[names.index(value)]


def text(key: str, value: Any) -> str:
    """Return `value` if it is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise UserError(f"{key}={value!r} must be a non-empty string")
    return value


def line(key: str, value: Any) -> str:
    """Return `value` if it is a non-empty string in one line, without letters that steer."""
    if steers(text(key, value)):
        raise UserError(f"{key}={value!r} must be one line without control characters")
    return str(value)


def optional_text(key: str, value: Any) -> str | None:
    """Return `value` if it is None or a non-empty string."""
    return None if value is None else text(key, value)


def flag(key: str, value: Any) -> bool:
    """Return `value` if it is a boolean."""
    if not isinstance(value, bool):
        raise UserError(f"{key}={value!r} must be true or false")
    return value


def flag_or_auto(key: str, value: Any) -> bool | None:
    """Return `value` if it is a boolean, and None for the word auto."""
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise UserError(f"{key}={value!r} must be true, false or auto")
    return value


def integer(key: str, value: Any, at_least: int) -> int:
    """Return `value` if it is an integer of at least `at_least`."""
    # bool is a subclass of int, and `limit=true` is a slip, not a one.
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(f"{key}={value!r} must be an integer of at least {at_least}")
    return value


def optional_integer(key: str, value: Any, at_least: int, at_most: float = math.inf) -> int | None:
    """Return `value` if it is None (written `null`) or an integer from `at_least` to `at_most`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(f"{key}={value!r} must be an integer of at least {at_least}, or null")
    if value > at_most:
        raise UserError(f"{key}={value!r} must be at most {at_most:.0f}, or null")
    return value


def batch_size(key: str, value: Any, auto: int) -> int:
    """Return `value` if it is an integer of at least 1, and `auto` for the word auto."""
    if value == "auto":
        return auto
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key}={value!r} must be an integer of at least 1, or auto")
    return value


def count_or_auto(key: str, value: Any, auto: int) -> int:
    """Return `value` if it is an integer of at least 0, and `auto` for the word auto."""
    if value == "auto":
        return auto
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{key}={value!r} must be an integer of at least 0, or auto")
    return value


def positive(key: str, value: Any) -> float:
    """Return `value` if it is a finite number above 0."""
    if not _finite(value) or value <= 0:
        raise UserError(f"{key}={value!r} must be a number above 0")
    return float(value)


def size(key: str, value: Any) -> int:
    """Return the bytes of a size: an integer, or a number with its unit, as `70GiB`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise UserError(
            f"{key}={value!r} must be a size: bytes, or a number with one of {', '.join(UNITS)}"
        )
    return int(float(found[1]) * UNITS[found[2]])


def room(key: str, value: Any) -> int:
    """Return the bytes of a size above 0."""
    found = size(key, value)
    if not found:
        raise UserError(f"{key}={value!r} must be a size above 0")
    return found


def ratio(key: str, value: Any) -> float:
    """Return `value` if it is a number in [0, 1)."""
    if not _finite(value) or not 0 <= value < 1:
        raise UserError(
            f"{key}={value!r} must be a number in [0, 1): the share of visual tokens removed"
        )
    return float(value)


def cache_ratio(key: str, value: Any) -> float:
    """Return `value` if it is a number in [0, 1)."""
    if not _finite(value) or not 0 <= value < 1:
        raise UserError(
            f"{key}={value!r} must be a number in [0, 1): the share of cache entries evicted"
        )
    return float(value)


def draft_ratio(key: str, value: Any) -> float:
    """Return `value` if it is a number in [0, 1]; only a draft can do without every visual token."""
    if not _finite(value) or not 0 <= value <= 1:
        raise UserError(
            f"{key}={value!r} must be a number in [0, 1]: the share of visual tokens the draft does without"
        )
    return float(value)


def _finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def table(key: str, value: Any) -> dict[str, Any]:
    """Return `value` as a dictionary with string keys; None is the empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{key}={value!r} must be a table of key: value pairs")
    return {str(name): item for name, item in value.items()}


def names(key: str, value: Any, empty: bool = False) -> tuple[str, ...]:
    """Return `value` as a tuple of strings; it may have no entries only where `empty` says so."""
    if not isinstance(value, list | tuple) or not (value or empty):
        raise UserError(f"{key}={value!r} must be a {'' if empty else 'non-empty '}list of names")
    return tuple(text(f"{key}[{index}]", item) for index, item in enumerate(value))


def only_known(prefix: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise unless the keys of `given` are exactly `known`; `prefix` is the config key of the table ("" at the top)."""
    expected = set(known)
    dot = f"{prefix}." if prefix else ""
    for name in given:
        if name not in expected:
            raise unknown_key(f"{dot}{name}", (f"{dot}{key}" for key in expected))
    missing = sorted(expected - set(given))
    if missing:
        raise UserError(f"config key {dot}{missing[0]} is missing")


def key_mistakes(prefix: str, given: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return what is wrong with a table: its unknown keys with the valid ones behind them, and what is missing."""
    expected = sorted(known)
    unknown = [name for name in given if name not in expected]
    lines = [
        f"{prefix}.{name} is not a config key{near_names(name, expected, at_most=1)}"
        for name in unknown
    ]
    if unknown:
        lines.append(f"valid: {', '.join(f'{prefix}.{name}' for name in expected)}")
    missing = [name for name in expected if name not in set(given)]
    return [*lines, *(f"config key {prefix}.{name} is missing" for name in missing)]


def gather(checks: Mapping[str, Callable[[], Any]], lines: Iterable[str] = ()) -> dict[str, Any]:
    """Run every check and return what each of them returns.

    Raises:
        Mistakes: some fail, or `lines` says what is wrong already; all of it in one line.
    """
    found: dict[str, Any] = {}
    wrong = list(lines)
    for name, check in checks.items():
        try:
            found[name] = check()
        except Mistakes as error:
            wrong += error.lines
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise Mistakes(wrong)
    return found


def only_some(prefix: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise unless all keys of `given` are among `known`; none has to be there."""
    dot = f"{prefix}." if prefix else ""
    expected = set(known)
    for name in given:
        if name not in expected:
            raise unknown_name(f"{dot}setting", name, expected)


def unknown_key(name: str, valid: Iterable[str]) -> UserError:
    """Return the error for a config key that does not exist: the key, the nearest and all valid ones of its table."""
    keys = sorted(valid)
    near = get_close_matches(name, keys, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return UserError(f"{name} is not a config key{hint}; valid: {', '.join(keys)}")
