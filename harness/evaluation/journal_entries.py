"""The form of journal entries: journals outlive crashes, disks and versions of this code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_count(item) for item in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_number(item) for item in value.values())


def is_table(value: Any) -> bool:
    """Return whether a value is a table."""
    return isinstance(value, Mapping)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_text, value))


def _shared(value: Any) -> bool:
    return isinstance(value, list) and all(
        is_table(item) and "value" in item and _texts(item.get("of")) for item in value
    )


def _documents(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_count(item) for item in value.values())


#: Keys of every entry about a sample; more keys are allowed.
SAMPLE: Mapping[str, Callable[[Any], bool]] = {"task": _text, "doc_id": _count}
ANSWER = {**SAMPLE, "answer": _text, "input_tokens": _count, "output_tokens": _count}
SCORES = {**SAMPLE, "scores": _numbers}
MAY_SCORES: Mapping[str, Callable[[Any], bool]] = {
    "units": _documents,
    "values": _shared,
    "own": _numbers,
}
#: Keys of the telemetry of an answer; a null value counts as absent.
RECORD: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("visual", "text", "kv_entries", "kv_bytes", "new_tokens"), _count),
    **dict.fromkeys(("requested", "kept", "entering"), _counts),
}
MAY: Mapping[str, Callable[[Any], bool]] = {
    "special": _count,
    "attended": _number,
    "spare": _count,
    "held": _counts,
    "held_special": _counts,
    "work": _counts,
    "times_ms": _numbers,
    "shared": _texts,
    "loop": _text,
    "accepted": is_table,
    "decoding": is_table,
    "denoising": is_table,
}


def check(
    entry: Any,
    must: Mapping[str, Callable[[Any], bool]],
    may: Mapping[str, Callable[[Any], bool]] | None = None,
) -> None:
    """Raise ValueError unless an entry has all keys of `must`, and values of `must` and `may` have their type."""
    if not isinstance(entry, Mapping):
        raise ValueError("not a table")
    present = {name: kind for name, kind in (may or {}).items() if entry.get(name) is not None}
    for name, is_valid in {**must, **present}.items():
        if not is_valid(entry.get(name)):
            raise ValueError(f"{name} is {entry.get(name)!r}")
