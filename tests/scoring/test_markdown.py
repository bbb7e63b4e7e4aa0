"""Answers in markdown as blocks, and formulas and texts as they are compared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.harness.evaluation.scoring.documents.markdown_blocks import (
    blocks,
    letters,
    lines_of_column,
    plain_formula,
    table_of_pipes,
    unicode_text,
)
from espalier.harness.evaluation.scoring.text_scores import plain_markdown

PIECES = [
    "|",
    "$",
    "$$",
    "\\[",
    "\\]",
    "\\(",
    "\\)",
    "<table>",
    "</table>",
    "<td>",
    "```",
    "\n",
    "\n\n",
    " ",
    "#",
    "a",
    "![",
]
PIECES += ["\\begin{tabular}", "\\end{tabular}", "{", "}", "]("]


def kinds(markdown: str) -> list[tuple[str, str]]:
    return [(block.kind, block.content) for block in blocks(markdown)]


def test_a_page_is_its_paragraphs_formulas_and_tables() -> None:
    page = "# Title\n\n![](x.png)\n\nIn it: $a_1$.\n\n\\[x\n= 1\\]\n\n<table><tr><td>1</td></tr></table>\n\nEnd"
    assert kinds(page) == [
        ("text", "# Title"),
        ("text", "In it: $a_1$."),
        ("inline", "\\[a_1\\]"),
        ("formula", "\\[x = 1\\]"),
        ("table", "<table><tr><td>1</td></tr></table>"),
        ("text", "End"),
    ]


def test_lines_are_paragraphs_where_none_is_empty() -> None:
    assert kinds("one\ntwo") == [("text", "one"), ("text", "two")]
    assert kinds("one\ntwo\n\nthree") == [("text", "one\ntwo"), ("text", "three")]


def test_a_formula_alone_in_its_paragraph_stands_apart() -> None:
    assert ("formula", "$x^2$") in kinds("one\n\n$x^2$\n\ntwo")


def test_tables_within_tables_belong_to_the_outer_one() -> None:
    inner = "<table><tr><td>in</td></tr></table>"
    outer = f"<table><tr><td>{inner}</td></tr></table>"
    assert kinds(outer) == [("table", outer)]
    # The first never ends: what ends within it counts.
    assert ("table", inner) in kinds(f"<table><tr><td>{inner}")


def test_pipes_and_latex_are_tables() -> None:
    assert kinds("| a | b |\n|---|:-:|\n| 1 | <2 |\n") == [
        ("table", "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td>&lt;2</td></tr></table>")
    ]
    assert [kind for kind, _ in kinds("\\begin{tabular}{l}a\\end{tabular}")] == ["latex_table"]
    assert table_of_pipes("|---|") == "<table></table>"


def test_fences_and_code_are_their_content() -> None:
    assert kinds("```markdown\nwords\n```") == [("text", "words")]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_markdown_raises(page: str) -> None:
    assert all(block.content.strip() for block in blocks(page) if block.kind == "text")


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("Two words, one\tline\n.", "Twowordsoneline"),
        ("\u4eca\u5929\uff0c\u597d!", "\u4eca\u5929\u597d"),
        ("rate $\\alpha_{1}$ of \\(x^2\\)", "rate\u03b1_1ofx2"),
        ("a price of $5 and $6", "apriceof5and6"),
        ("100\\%", "100"),
    ],
)
def test_texts_are_compared_by_their_letters(text: str, compared: str) -> None:
    assert letters(text) == compared


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        ("\\frac{a}{b}", "ab"),
        ("\\mathbf{x} \\leq \\Omega", "x \u03a9"),
        ("\\sin\\theta", "sin\u03b8"),
        ("\\begin{array}{l}x", "x"),
        ("\\", "\\"),
    ],
)
def test_formulas_as_text(latex: str, text: str) -> None:
    assert unicode_text(latex) == text


@pytest.mark.parametrize(
    "same", ["$$\nA^{2} = \\mathrm b\n$$", "\\[ a^{2}=b . \\]", "A^{2}\\quad=\\left b \\tag{3}"]
)
def test_typography_of_formulas_does_not_count(same: str) -> None:
    assert plain_formula(same) == "a^{2}=b"


def test_a_column_of_formulas_is_its_lines() -> None:
    assert lines_of_column("\\begin{array}{l} a \\\\ b=2 \\\\ \\end{array}") == ["a", "b=2"]
    assert lines_of_column("\\begin{array}{ll} a & b \\end{array}") is None
    assert lines_of_column("a=b") is None


def test_boxes_of_an_answer_go() -> None:
    said = (
        "<|ref|>title<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>\n# Title\n\n"
        "<|ref|>image<|/ref|><|det|>[[5, 6, 7, 8]]<|/det|>\n\nx \\coloneqq y<\uff5cend\u2581of\u2581sentence\uff5c>"
    )
    assert plain_markdown(said) == "# Title\n\n![](picture)\n\nx := y"
    assert plain_markdown("plain <|ref|> text") == "plain <|ref|> text"
