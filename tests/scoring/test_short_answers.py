"""Short answers against their references, exact, contained or near, and values that answers to mathematics state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from espalier.harness.evaluation.scoring.math_answers import number, same_value, stated_value
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


#: Writings of one value, and of two.
SAME = [
    *(
        (r"\frac34", r"\frac{3}{4}"),
        (r"\dfrac{3}{4}", "0.75"),
        ("3/4", ".75"),
        (r"\tfrac12", "1/2"),
    ),
    *((r"\sqrt{9}", "3"), (r"\sqrt9", "3"), (r"\sqrt[3]{8}", "2"), (r"\sqrt[3]{-8}", "-2")),
    *((r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{\sqrt3}{2}", r"\frac{\sqrt{3}}2")),
    *(("12 cm", "12"), (r"12\text{ cm}^2", "12"), (r"12\,\mathrm{m/s}", "12"), ("1,000", "1000")),
    *((r"1{,}000", "1000"), ("x=5", "5"), (r"x \approx 5", "5"), (r"\text{Monday}", "Monday")),
    *((r"30^\circ", "30"), (r"30^{\circ}", "30"), (r"75\%", "75"), (r"\left(3, 4\right)", "(3,4)")),
    *(("4\u03c0", r"4\pi"), (r"3\frac{1}{2}", "3.5"), ("\u22125", "-5"), (r"\(12\)", "12")),
    *((r"\$5", "5"), (r"10^{3}", "1000"), ("5.0", "5"), (r"\{1, 2\}", "{1,2}"), ("2(3+4)", "14")),
    *(("8:15", "8:15"), (r"\text{(B)}", "(b)")),
]
DIFFERENT = [
    *(("3/4", "0.8"), ("(3,4)", "(4,3)"), ("6x", "6"), ("3 and 4", "3"), ("", ""), ("12", "1,2")),
    *(
        (r"9^{9^{9^{9}}}", "1"),
        ("((((((((", "1"),
        ("0 0 0", "0"),
        ("1/0", "0"),
        ("(-8)^{0.5}", "1"),
    ),
    *((r"\sqrt{-1}", "1"), ("nan", "1"), ("inf", "1"), ("(" * 5000, "1"), ("1" * 400, "1")),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_writings_of_one_value_are_the_same(first: str, second: str) -> None:
    assert same_value(first, second)
    assert same_value(second, first)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_other_values_are_not(first: str, second: str) -> None:
    assert not same_value(first, second)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        *(
            (r"So \boxed{\frac34}.", r"\frac34"),
            (r"\boxed{1} no, \boxed{\text{Monday}}", r"\text{Monday}"),
        ),
        *(("The answer is 12.", "12"), ("**Answer:** 12 cm", "12 cm"), ("the total is 12.", "12")),
        *(("The answer is 3.5. Done", "3.5"), ("Therefore, 12", "12"), ("### Result\n12", "12")),
        *(("Monday", "Monday"), ("The final answer is $\\frac{3}{4}$.", "$\\frac{3}{4}$")),
        # A box without its end, signs, and many words state none.
        *((r"\boxed{12", ""), ("; ; ;", ""), ("", ""), ("It may rise or fall over the year", "")),
    ],
)
def test_an_answer_states_its_last_box_or_what_follows_a_phrase(answer: str, value: str) -> None:
    assert stated_value(answer) == value


def test_a_number_ends_where_the_text_does() -> None:
    assert (number("12 apples and 3"), number("1e5")) == (None, None)
