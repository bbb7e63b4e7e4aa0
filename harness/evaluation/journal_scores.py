"""Scores of samples in a run's journal, and checks of its entries; reading them needs no model library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from espalier.harness.errors import tell_once
from espalier.harness.store.answer_digest import Key

Item = TypeVar("Item")


@dataclass(frozen=True)
class SampleScores:
    """The scores of one sample.

    Attributes:
        scores: contributions to each metric.
        units: the first document of the sample's unit by metric; itself where a metric is not named.
        values: raw values of metrics that are not a mean.
    """

    scores: Mapping[str, float]
    units: Mapping[str, int]
    values: Mapping[str, Any]


def read_scorings(entries: Iterable[Mapping[str, Any]]) -> dict[Key, SampleScores]:
    """Return the scores of each sample; the last entry of a key counts, damaged entries are skipped."""
    return dict(sound_entries(entries, "scores", _scoring))


def _scoring(entry: Mapping[str, Any]) -> tuple[Key, SampleScores]:
    check(entry, SCORING)
    groups = entry.get("values") or ()
    values = {metric: group["value"] for group in groups for metric in group["of"]}
    scores = SampleScores(dict(entry["scores"]), dict(entry.get("units") or {}), values)
    return (entry["task"], entry["doc_id"]), scores


def sound_entries(
    entries: Iterable[Mapping[str, Any]], name: str, read: Callable[[Mapping[str, Any]], Item]
) -> Iterator[Item]:
    """Yield what the entries with a key hold; damaged ones are named on stderr and left out."""
    for entry in entries:
        if name in entry:
            try:
                yield read(entry)
            except (ValueError, LookupError, TypeError) as error:
                sample = f"{entry.get('task')}/{entry.get('doc_id')}"
                reason = str(error)[:200]
                tell_once(f"journal: an entry of {sample} is damaged and left out: {reason}")


def check(entry: Any, tests: Mapping[str, Callable[[Any], bool]]) -> None:
    """Raise ValueError unless a table has a value that passes the test of each name; further keys do not matter."""
    if not isinstance(entry, Mapping):
        raise ValueError("not a table")
    for name, is_valid in tests.items():
        if not is_valid(entry.get(name)):
            raise ValueError(f"{name} is {entry.get(name)!r}")


@cache
def type_test(hint: Any) -> Callable[[Any], bool]:
    """Return whether a JSON value is of an annotated type: lists are tuples, integers pass as floats."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return lambda value: True
    if NoneType in arguments:
        present = type_test(arguments[0])
        return lambda value: value is None or present(value)
    if issubclass(kind, tuple):
        item = get_origin(arguments[0]) or arguments[0] if arguments else int
        # Records have hundreds of numbers, so that their types are compared without a call for each.
        types_of_items = frozenset({item})
        return lambda value: (
            isinstance(value, list | tuple) and types_of_items.issuperset(map(type, value))
        )
    if issubclass(kind, Mapping):
        fits = type_test(arguments[1])
        return lambda value: isinstance(value, Mapping) and all(map(fits, value.values()))
    types = (int, float) if kind is float else kind
    # True is an int for Python.
    return lambda value: isinstance(value, types) and isinstance(value, bool) == (kind is bool)


#: Tests of the keys of an entry of scores; the last three may be missing.
SCORING = {
    "task": type_test(str),
    "doc_id": type_test(int),
    "scores": type_test(Mapping[str, float]),
    "units": type_test(Mapping[str, int] | None),
    "own": type_test(Mapping[str, float] | None),
    "values": type_test(tuple[dict[str, Any], ...] | None),
}
