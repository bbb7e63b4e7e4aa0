"""Pages of OmniDocBench: worked cases of its matching and metrics, and answers that are no page."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.harness.evaluation.scoring.documents.block_matches import (
    BlockMatch,
    one_to_one,
    quick_match,
)
from espalier.harness.evaluation.scoring.documents.omnidoc_page import (
    PageFormula,
    PageScores,
    overall_score,
    score_page,
)
from tests.benchmarks.fixtures.ocr import (
    CHINESE,
    ENGLISH,
    FORMULA,
    PAGES,
    SECOND,
    TABLE,
    block,
    page,
)

PAGE = PAGES[0]
PERFECT = f"# A Fable\n\n{ENGLISH}\n\n$${FORMULA}$$\n\n{TABLE}"


def texts(*contents: str) -> dict[str, Any]:
    return page(
        0, "english", [block(n, "text_block", n + 1, text=text) for n, text in enumerate(contents)]
    )


def test_a_page_as_it_is_is_perfect() -> None:
    found = score_page(PAGE, PERFECT)
    assert found == PageScores(
        0, 0, 0, 1, 1, (PageFormula(f"$$\n{FORMULA}\n$$", f"\\[{FORMULA}\\]"),)
    )


def test_an_empty_answer_misses_everything() -> None:
    found = score_page(PAGE, "")
    assert (found.text_edit, found.formula_edit, found.order_edit) == (1, 1, 1)
    assert (found.table_teds, found.table_teds_s) == (0, 0)
    assert found.formulas == (PageFormula(f"$$\n{FORMULA}\n$$", ""),)


def test_a_formula_within_a_text_stands_for_one_that_stands_alone() -> None:
    right = page(0, "english", [block(0, "equation_isolated", 1, latex=f"$${FORMULA}$$")])
    found = score_page(right, f"So ${FORMULA}$ holds.")
    assert (found.text_edit, found.formula_edit) == (None, 0)
    assert len(found.formulas) == 1


def test_a_page_has_no_score_of_what_it_has_not() -> None:
    assert score_page(texts(ENGLISH), ENGLISH) == PageScores(0, None, 0, None, None, ())


def test_edits_of_a_page_are_added_up_before_they_are_divided() -> None:
    # Three letters of fourteen are others, and a text of four is missing.
    found = score_page(texts("abcdefghijklmn", "wxyz"), "abcdefghijkLMN")
    assert found.text_edit == pytest.approx((3 + 4) / (14 + 4))


def test_headers_are_looked_for_and_do_not_count() -> None:
    header = block(5, "header", None, text="Annual report of 2019")
    right = page(0, "english", [block(0, "text_block", 1, text=ENGLISH), header])
    found = score_page(right, f"Annual report of 2019\n\n{ENGLISH}")
    assert (found.text_edit, found.order_edit) == (0, 0)


def test_what_the_answer_cuts_in_two_is_one_paragraph() -> None:
    found = score_page(texts(ENGLISH, SECOND), f"{ENGLISH[:40]}\n\n{ENGLISH[40:]}\n\n{SECOND}")
    assert (found.text_edit, found.order_edit) == (0, 0)


def test_what_the_answer_joins_is_both_paragraphs() -> None:
    found = score_page(texts(ENGLISH, SECOND), f"{ENGLISH} {SECOND}")
    assert found.text_edit == 0


def test_reading_order_is_that_of_the_matched_texts() -> None:
    found = score_page(texts(ENGLISH, SECOND, CHINESE), f"{SECOND}\n\n{ENGLISH}\n\n{CHINESE}")
    assert found.text_edit == 0
    assert found.order_edit == pytest.approx(2 / 3)


def test_a_formula_written_as_text_is_compared_as_text() -> None:
    formula = block(1, "equation_isolated", 2, latex=f"$${FORMULA}$$")
    right = page(0, "english", [block(0, "text_block", 1, text=ENGLISH), formula])
    found = score_page(right, f"{ENGLISH}\n\na2+b2=c2")
    assert (found.text_edit, found.formula_edit) == (0, None)


def test_cells_of_a_table_that_is_none_of_the_pages_are_texts() -> None:
    right = page(
        0, "english", [block(0, "text_block", 1, text=ENGLISH), block(1, "table", 2, html=TABLE)]
    )
    found = score_page(right, f"<table><tr><td>{ENGLISH}</td></tr></table>\n\n{TABLE}")
    assert (found.text_edit, found.table_teds) == (0, 1)


def test_latex_tables_are_wrong() -> None:
    found = score_page(PAGE, PERFECT.replace(TABLE, "\\begin{tabular}{l}apple\\end{tabular}"))
    assert (found.table_teds, found.table_teds_s) == (0, 0)


def test_a_column_of_formulas_is_matched_line_by_line() -> None:
    column = "\\begin{array}{l} a=b+c \\\\ d=e+f \\end{array}"
    right = page(0, "english", [block(0, "equation_isolated", 1, latex=f"$${column}$$")])
    assert score_page(right, "$$a=b+c$$\n\n$$d=e+f$$").formula_edit == 0


def test_matching_by_hand() -> None:
    # One is found, two are one text of the answer, and the last has no partner but what is left.
    right = ["alpha beta gamma", "one two three", "four five six", "nothing"]
    said = ["one two three four five six", "alpha beta gamme", "zzz"]
    assert sorted(quick_match(right, said), key=lambda pair: pair.page) == [
        BlockMatch((0,), (1,)),
        BlockMatch((1, 2), (0,)),
        BlockMatch((3,), (2,)),
    ]
    assert one_to_one(["aa", "bb"], ["bb"]) == [BlockMatch((0,), ()), BlockMatch((1,), (0,))]


@given(
    st.lists(st.text("abcd ", min_size=1, max_size=12), max_size=5),
    st.lists(st.text("abcd ", min_size=1, max_size=12), max_size=5),
)
@settings(deadline=None)
def test_every_text_of_a_page_is_in_one_pair(right: list[str], said: list[str]) -> None:
    pairs = quick_match(right, said)
    assert sorted(place for pair in pairs for place in pair.page) == list(range(len(right)))
    assert all(set(pair.answer) <= set(range(len(said))) for pair in pairs)


def test_overall_is_the_mean_of_what_pages_have() -> None:
    assert overall_score([[1.0, None, 0.5], [0.5, 0.25, None]]) == pytest.approx(
        (0.75 + 0.25 + 0.5) / 3
    )
    assert overall_score([[1.0, None, None]]) == 1
    with pytest.raises(ZeroDivisionError):
        overall_score([[None, None, None]])


BAD = [
    "   \n\t\n ",
    "\\[ \\frac{1}{ \\left( }",
    "$" * 999,
    "<table><tr><td>" * 500,
    "</table>" * 500 + "<table>",
    "|" * 5000 + "\n" + "|" * 5000 + "\n",
    "x" * 100_000,
    "word and another word. " * 5_000,
    "a line\n\n" * 2_000,
    "\u4eca\u5929\u597d\n" * 2_000,
    "\\begin{array}{l}" * 300,
    "![](" * 300,
    "\x00\ud800",
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_answers_are_wrong_in_bounded_time(number: int) -> None:
    start = time.process_time()
    found = score_page(PAGE, BAD[number])
    assert time.process_time() - start < 20
    assert found.text_edit is not None
    assert found.text_edit > 0.5
    assert found.table_teds is not None
    assert found.table_teds < 0.5
