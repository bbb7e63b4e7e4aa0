"""Short answers against their references: exact, contained, near."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from espalier.harness.evaluation.scoring.text_scores import anls, contains, equal, within
from espalier.harness.specs.records.own_data import numbers, right_letter

OPTIONS = {"A": "red", "B": "Blue", "C": "blue"}

#: Function, arguments, value.
BY_HAND: tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...] = (
    # Equal but for case, blanks and ends.
    (equal, ("Red.", "red"), True),
    (equal, ("  two   words ", "Two words"), True),
    (equal, ("red car", "red"), False),
    (equal, ("", "red"), False),
    (equal, ("...", "red"), False),
    (equal, ("?", "?"), True),
    # Contained as whole words.
    (contains, ("The car is red, I think.", "Red"), True),
    (contains, ("It is bored.", "red"), False),
    (contains, ("它是红色的", "红色"), True),
    (contains, ("", "red"), False),
    # The similarity from a half on.
    (anls, ("Hello", "hello"), 1),
    (anls, ("hallo", "hello"), pytest.approx(0.8)),
    (anls, ("abcd", "abxy"), 0),
    (anls, ("", "x"), 0),
    # Within the larger tolerance.
    (within, (105, 100, 0.05, 0), True),
    (within, (105.1, 100, 0.05, 0), False),
    (within, (0.3, 0.1 + 0.2, 0, 0), True),
    (within, (3, 1, 0.1, 2), True),
    (numbers, ("about $1,200.50.",), [1200.5]),
    (numbers, ("3 of 5",), [3, 5]),
    (numbers, ("-4 %",), [-4]),
    (numbers, ("1e3",), [1000]),
    (numbers, (".5",), [0.5]),
    (numbers, ("v2 and 3a",), []),
    (numbers, ("none",), []),
    # A letter, or the text of one choice.
    (right_letter, ("(b).", OPTIONS), "B"),
    (right_letter, ("RED", OPTIONS), "A"),
    (right_letter, ("blue", OPTIONS), ""),
    (right_letter, ("D", OPTIONS), ""),
)


@pytest.mark.parametrize(("function", "arguments", "value"), BY_HAND)
def test_short_answers_by_hand(
    function: Callable[..., Any], arguments: tuple[Any, ...], value: Any
) -> None:
    assert function(*arguments) == value
