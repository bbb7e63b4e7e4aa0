"""The unit tests of olmOCR-Bench: each kind by hand, and answers that are nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.harness.errors import UserError
from espalier.harness.evaluation.scoring.unit_tests import (
    CHECKS,
    GridCell,
    contains,
    equations,
    grids,
    has_formula,
    laid_out,
    passes,
    plain,
    tokens,
)

HTML = (
    '<table><thead><tr><th rowspan="2">Year</th><th colspan="2">Sales</th></tr><tr><th>North</th><th>South</th></tr>'
    "</thead><tr><td>2019</td><td>4.5%</td><td>7</td></tr><tr><td>2020</td><td>2.4%</td><td>8</td></tr></table>"
)
PIPES = "| Year | North |\n|---|---|\n| 2019 | 4.5% |\n| 2020 | 2.4% |"


def page_test(kind: str, **more: Any) -> dict[str, Any]:
    return {"id": "t", "type": kind, "pdf": "a.pdf", "page": 1, **more}


@pytest.mark.parametrize(
    ("test", "answer", "wanted"),
    [
        (page_test("present", text="the end"), "It is **the** end.", True),
        (page_test("present", text="the end"), "It is The End.", False),
        (page_test("present", text="the end", case_sensitive=False), "It is The End.", True),
        (page_test("present", text="the end", max_diffs=1), "It is tea emd.", False),
        (page_test("present", text="the end", max_diffs=1), "It is tha end.", True),
        (page_test("present", text="the end"), "end", False),
        (page_test("absent", text="the end"), " ", True),
        (page_test("present", text="the end", first_n=6), "It is the end.", False),
        (page_test("present", text="\u2018a\u2019 \u2013 b"), "'a' - b", True),
        (page_test("absent", text="page 3"), "text\n\npage 3", False),
        (page_test("absent", text="page 3", last_n=5), "page 3 and more", True),
        (page_test("absent", text="page 3"), "", True),
        (page_test("order", before="one", after="two"), "one, two", True),
        (page_test("order", before="two", after="one"), "one, two", False),
        (page_test("order", before="one", after="one"), "only one", False),
        (page_test("order", before="three", after="four", max_diffs=1), "thre, fuor four", True),
        (page_test("order", before="one", after="two"), "one", False),
        (page_test("baseline"), "some words", True),
        (page_test("baseline"), " .,; \n", False),
        (page_test("baseline"), "so " + "ab" * 33, False),
        (page_test("baseline"), "some \u4eca words", False),
        (page_test("baseline", check_disallowed_characters=False), "some \u4eca words", True),
        (page_test("baseline", max_length=3), "abc", True),
        (page_test("baseline", max_length=3), "abcd", False),
        (
            page_test("baseline", max_length=0, max_length_skips_image_alt_tags=True),
            "![a](b)",
            True,
        ),
        # Half of a cell must be right whatever a test allows.
        (page_test("table", cell="2.4%", max_diffs=4), "a | b\n2.5% | d", True),
        (page_test("table", cell="2.4%", max_diffs=4), "a | b\nc | d", False),
    ],
)
def test_answers_by_hand(test: dict[str, Any], answer: str, wanted: bool) -> None:
    assert passes(test, answer) is wanted


@pytest.mark.parametrize(
    ("around", "html", "pipes"),
    [
        ({}, True, True),
        ({"up": "4.5%"}, True, True),
        ({"up": "2019"}, False, False),
        ({"left": "2020"}, True, True),
        ({"right": "8"}, True, False),
        ({"left_heading": "2020"}, True, True),
        ({"top_heading": "North"}, True, True),
        ({"top_heading": "Sales"}, True, False),
        ({"top_heading": "Year"}, False, False),
        ({"up": "4.5%", "right": "7"}, False, False),
    ],
)
def test_cells_by_hand(around: dict[str, str], html: bool, pipes: bool) -> None:
    test = page_test("table", cell="2.4%", **around)
    assert passes(test, f"Before\n\n{HTML}\n\nafter") is html
    assert passes(test, f"Before\n\n{PIPES}\n\nafter") is pipes


def test_cells_span_rows_and_columns() -> None:
    grid = laid_out(
        [[GridCell("a", rows=2), GridCell("b", columns=2)], [GridCell("c"), GridCell("d")]]
    )
    assert {place: cell.text for place, cell in grid.cells.items()} == {
        (0, 0): "a",
        (0, 1): "b",
        (1, 1): "c",
        (1, 2): "d",
    }
    assert grid.neighbours((0, 0), 0, 1) == {(0, 1), (1, 1)}
    assert grid.neighbours((0, 1), 1, 0) == {(1, 1), (1, 2)}
    assert grid.neighbours((0, 0), -1, 0) == set()


@pytest.mark.parametrize(
    ("wanted", "answer", "has"),
    [
        ("x^2", "so $x^{2}$", True),
        ("x^{2}", "so \\(3 x ^ 2 dx\\)", True),
        ("x^2", "so x^2", False),
        ("x^2", "so \\[x^3\\]", False),
        ("x^{12}", "\\[x^1 2\\]", False),
        ("\\frac{a}{b}", "$$\\dfrac a b$$", True),
        ("a \\le \\left( b \\right)", "$a \\leq (b)$", True),
        ("\\mathrm{d} x", "$\\text{d}x$", True),
        ("\\sum_{i=1}^{n} i", "\\[ \\sum\\limits_{i = 1}^n i = 5 \\]", True),
        ("\\alpha", "$\\alphabet$", False),
        ("ab", "$a$ $b$", False),
        ("a+b", "$a+b", False),
    ],
)
def test_formulas_by_hand(wanted: str, answer: str, has: bool) -> None:
    assert has_formula(wanted, answer) is has


@given(st.text("{}^_ab\\$ ", max_size=20))
def test_a_formula_stands_in_itself(latex: str) -> None:
    formula = tokens(latex)
    assert contains(formula, formula) is bool(formula)
    assert all(isinstance(equation, str) for equation in equations(f"\\[{latex}\\]"))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        " \n",
        "x" * 100_000,
        "|" * 9_999,
        "<table>" * 999,
        "<table><tr><td rowspan='x' colspan=99999999>a",
        "$" * 999,
        "\\[" * 999,
        "\ud800\x00",
        "word " * 20_000,
    ],
)
def test_bad_answers_fail_in_bounded_time(answer: str) -> None:
    start = time.process_time()
    tests = (
        page_test("present", text="not on the page", max_diffs=2),
        page_test("order", before="not on it", after="nor this one", max_diffs=3),
        page_test("table", cell="2.4%", up="4.5%"),
        page_test("math", math="x^2"),
    )
    assert not any(passes(test, answer) for test in tests)
    assert time.process_time() - start < 10


def test_a_test_of_another_kind_is_named() -> None:
    with pytest.raises(UserError, match=r"test 't': type='footnote'; valid: present, absent"):
        passes(page_test("footnote"), "")
    for kind in set(CHECKS) - {"baseline"}:
        with pytest.raises(UserError, match=f"of type '{kind}' has no"):
            passes(page_test(kind), "$a$ | b\n | c")


def test_tables_and_plain_text() -> None:
    assert [
        sorted(cell.text for cell in grid.cells.values()) for grid in grids("a | b\nc | d\n\nno")
    ] == [["a", "b", "c", "d"]]
    assert list(grids("a | b\n\nno")) == []
    assert plain("*a*  __b__<br/>c\n") == "a b c "
