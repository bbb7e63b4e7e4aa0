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


def only(*blocks: dict[str, Any]) -> dict[str, Any]:
    return page(0, "english", list(blocks))


TEXT = block(0, "text_block", 1, text=ENGLISH)
COLUMN = "\\begin{array}{l} a=b+c \\\\ d=e+f \\end{array}"
PERFECT_SCORES = {"text_edit": 0, "formula_edit": 0, "order_edit": 0, "table_teds": 1}

#: A page, an answer, and scores of it.
SCORED: tuple[tuple[dict[str, Any], str, dict[str, Any]], ...] = (
    (
        PAGE,
        PERFECT,
        {
            **PERFECT_SCORES,
            "table_teds_s": 1,
            "formulas": (PageFormula(f"$$\n{FORMULA}\n$$", f"\\[{FORMULA}\\]"),),
        },
    ),
    # An empty answer misses everything.
    (
        PAGE,
        "",
        {
            **{"text_edit": 1, "formula_edit": 1, "order_edit": 1, "table_teds": 0},
            "table_teds_s": 0,
            "formulas": (PageFormula(f"$$\n{FORMULA}\n$$", ""),),
        },
    ),
    # A formula within a text stands for one that stands alone.
    (
        only(block(0, "equation_isolated", 1, latex=f"$${FORMULA}$$")),
        f"So ${FORMULA}$ holds.",
        {
            **{"text_edit": None, "formula_edit": 0},
            "formulas": (PageFormula(f"$${FORMULA}$$", f"\\[{FORMULA}\\]"),),
        },
    ),
    # A page has no score of what it has not.
    (
        texts(ENGLISH),
        ENGLISH,
        {
            **{"text_edit": 0, "formula_edit": None, "order_edit": 0, "table_teds": None},
            **{"table_teds_s": None, "formulas": ()},
        },
    ),
    # Edits are added up before they are divided: three letters of fourteen are others, and a text of four is missing.
    (texts("abcdefghijklmn", "wxyz"), "abcdefghijkLMN", {"text_edit": (3 + 4) / (14 + 4)}),
    # Headers are looked for and do not count.
    (
        only(TEXT, block(5, "header", None, text="Annual report of 2019")),
        f"Annual report of 2019\n\n{ENGLISH}",
        {"text_edit": 0, "order_edit": 0},
    ),
    # What the answer cuts in two is one paragraph, and what it joins is both.
    (
        texts(ENGLISH, SECOND),
        f"{ENGLISH[:40]}\n\n{ENGLISH[40:]}\n\n{SECOND}",
        {"text_edit": 0, "order_edit": 0},
    ),
    (texts(ENGLISH, SECOND), f"{ENGLISH} {SECOND}", {"text_edit": 0}),
    # The reading order is that of the matched texts.
    (
        texts(ENGLISH, SECOND, CHINESE),
        f"{SECOND}\n\n{ENGLISH}\n\n{CHINESE}",
        {"text_edit": 0, "order_edit": 2 / 3},
    ),
    # A formula written as text is compared as text.
    (
        only(TEXT, block(1, "equation_isolated", 2, latex=f"$${FORMULA}$$")),
        f"{ENGLISH}\n\na2+b2=c2",
        {"text_edit": 0, "formula_edit": None},
    ),
    # Cells of a table that is none of the page's are texts.
    (
        only(TEXT, block(1, "table", 2, html=TABLE)),
        f"<table><tr><td>{ENGLISH}</td></tr></table>\n\n{TABLE}",
        {"text_edit": 0, "table_teds": 1},
    ),
    # Tables in LaTeX are wrong.
    (
        PAGE,
        PERFECT.replace(TABLE, "\\begin{tabular}{l}apple\\end{tabular}"),
        {"table_teds": 0, "table_teds_s": 0},
    ),
    # A column of formulas is matched line by line.
    (
        only(block(0, "equation_isolated", 1, latex=f"$${COLUMN}$$")),
        "$$a=b+c$$\n\n$$d=e+f$$",
        {"formula_edit": 0},
    ),
)


@pytest.mark.parametrize(("right", "answer", "scores"), SCORED)
def test_pages_by_hand(right: dict[str, Any], answer: str, scores: dict[str, Any]) -> None:
    page_scores = score_page(right, answer)
    for name, value in scores.items():
        is_number = isinstance(value, int | float)
        assert getattr(page_scores, name) == (pytest.approx(value) if is_number else value), name


def test_matching_by_hand() -> None:
    # One is found, two are one text of the answer, and the last has no partner but what is left.
    right = ["alpha beta gamma", "one two three", "four five six", "nothing"]
    lines = ["one two three four five six", "alpha beta gamme", "zzz"]
    assert sorted(quick_match(right, lines), key=lambda pair: pair.page) == [
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
def test_every_text_of_a_page_is_in_one_pair(right: list[str], lines: list[str]) -> None:
    pairs = quick_match(right, lines)
    assert sorted(place for pair in pairs for place in pair.page) == list(range(len(right)))
    assert all(set(pair.answer) <= set(range(len(lines))) for pair in pairs)


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


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_answers_are_wrong_in_bounded_time(number: int) -> None:
    start = time.process_time()
    page_scores = score_page(PAGE, BAD[number])
    assert time.process_time() - start < 20
    assert page_scores.text_edit > 0.5
    assert page_scores.table_teds < 0.5
