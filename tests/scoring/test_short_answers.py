"""Short answers against their references: exact, contained, near."""

from __future__ import annotations

import pytest

from espalier.harness.evaluation.scoring.text_scores import anls, contains, equal, within
from espalier.harness.specs.records.own_data import numbers, right_letter


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("Red.", "red", True),
        ("  two   words ", "Two words", True),
        ("red car", "red", False),
        ("", "red", False),
        ("...", "red", False),
        ("?", "?", True),
    ],
)
def test_equal_but_for_case_blanks_and_ends(answer: str, reference: str, right: bool) -> None:
    assert equal(answer, reference) == right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("The car is red, I think.", "Red", True),
        ("It is bored.", "red", False),
        ("它是红色的", "红色", True),
        ("", "red", False),
    ],
)
def test_a_reference_is_contained_as_whole_words(answer: str, reference: str, right: bool) -> None:
    assert contains(answer, reference) == right


def test_anls_is_the_similarity_from_a_half_on() -> None:
    assert anls("Hello", "hello") == 1
    assert anls("hallo", "hello") == pytest.approx(0.8)
    assert anls("abcd", "abxy") == 0
    assert anls("", "x") == 0


def test_a_number_is_within_the_larger_tolerance() -> None:
    assert within(105, 100, 0.05, 0)
    assert not within(105.1, 100, 0.05, 0)
    assert within(0.3, 0.1 + 0.2, 0, 0)
    assert within(3, 1, 0.1, 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("about $1,200.50.", [1200.5]),
        ("3 of 5", [3, 5]),
        ("-4 %", [-4]),
        ("1e3", [1000]),
        (".5", [0.5]),
        ("v2 and 3a", []),
        ("none", []),
    ],
)
def test_numbers_of_a_text(text: str, expected: list[float]) -> None:
    assert numbers(text) == expected


def test_a_reference_is_a_letter_or_the_text_of_one_choice() -> None:
    options = {"A": "red", "B": "Blue", "C": "blue"}
    assert right_letter("(b).", options) == "B"
    assert right_letter("RED", options) == "A"
    assert right_letter("blue", options) == ""
    assert right_letter("D", options) == ""
