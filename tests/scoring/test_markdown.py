"""Answers in markdown as blocks, and formulas and texts as they are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


INNER = "<table><tr><td>in</td></tr></table>"
OUTER = f"<table><tr><td>{INNER}</td></tr></table>"

#: Pages, and the kind and content of each of their blocks.
BLOCKS: tuple[tuple[str, list[tuple[str, str]]], ...] = (
    (
        "# Title\n\n![](x.png)\n\nIn it: $a_1$.\n\n\\[x\n= 1\\]\n\n<table><tr><td>1</td></tr></table>\n\nEnd",
        [
            ("text", "# Title"),
            ("text", "In it: $a_1$."),
            ("inline", "\\[a_1\\]"),
            ("formula", "\\[x = 1\\]"),
            ("table", "<table><tr><td>1</td></tr></table>"),
            ("text", "End"),
        ],
    ),
    # Lines are paragraphs where none is empty.
    ("one\ntwo", [("text", "one"), ("text", "two")]),
    ("one\ntwo\n\nthree", [("text", "one\ntwo"), ("text", "three")]),
    # A formula alone in its paragraph stands apart.
    (
        "one\n\n$x^2$\n\ntwo",
        [("text", "one"), ("inline", "\\[x^2\\]"), ("formula", "$x^2$"), ("text", "two")],
    ),
    # Tables within tables belong to the outer one; if that never ends, what ends within it counts.
    (OUTER, [("table", OUTER)]),
    (f"<table><tr><td>{INNER}", [("text", "<table><tr><td>"), ("table", INNER)]),
    (
        "| a | b |\n|---|:-:|\n| 1 | <2 |\n",
        [
            (
                "table",
                "<table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td>&lt;2</td></tr></table>",
            )
        ],
    ),
    (
        "\\begin{tabular}{l}a\\end{tabular}",
        [("latex_table", "\\begin{tabular}{l}a\\end{tabular}")],
    ),
    # Fences and code are their content.
    ("```markdown\nwords\n```", [("text", "words")]),
)


@pytest.mark.parametrize(("markdown", "kinds"), BLOCKS)
def test_blocks_by_hand(markdown: str, kinds: list[tuple[str, str]]) -> None:
    assert [(block.kind, block.content) for block in blocks(markdown)] == kinds


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_markdown_raises(page: str) -> None:
    assert all(block.content.strip() for block in blocks(page) if block.kind == "text")


#: A page with the boxes of its blocks.
BOXED = (
    "<|ref|>title<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>\n# Title\n\n"
    "<|ref|>image<|/ref|><|det|>[[5, 6, 7, 8]]<|/det|>\n\nx \\coloneqq y<\uff5cend\u2581of\u2581sentence\uff5c>"
)

#: Texts as they are compared: function, text, value.
COMPARED: tuple[tuple[Callable[[str], Any], str, Any], ...] = (
    (letters, "Two words, one\tline\n.", "Twowordsoneline"),
    (letters, "\u4eca\u5929\uff0c\u597d!", "\u4eca\u5929\u597d"),
    (letters, "rate $\\alpha_{1}$ of \\(x^2\\)", "rate\u03b1_1ofx2"),
    (letters, "a price of $5 and $6", "apriceof5and6"),
    (letters, "100\\%", "100"),
    (unicode_text, "\\frac{a}{b}", "ab"),
    (unicode_text, "\\mathbf{x} \\leq \\Omega", "x \u03a9"),
    (unicode_text, "\\sin\\theta", "sin\u03b8"),
    (unicode_text, "\\begin{array}{l}x", "x"),
    (unicode_text, "\\", "\\"),
    (plain_formula, "$$\nA^{2} = \\mathrm b\n$$", "a^{2}=b"),
    (plain_formula, "\\[ a^{2}=b . \\]", "a^{2}=b"),
    (plain_formula, "A^{2}\\quad=\\left b \\tag{3}", "a^{2}=b"),
    (lines_of_column, "\\begin{array}{l} a \\\\ b=2 \\\\ \\end{array}", ["a", "b=2"]),
    (lines_of_column, "\\begin{array}{ll} a & b \\end{array}", None),
    (lines_of_column, "a=b", None),
    (table_of_pipes, "|---|", "<table></table>"),
    (plain_markdown, BOXED, "# Title\n\n![](picture)\n\nx := y"),
    (plain_markdown, "plain <|ref|> text", "plain <|ref|> text"),
)


@pytest.mark.parametrize(("function", "text", "value"), COMPARED)
def test_texts_are_compared_without_what_does_not_count(
    function: Callable[[str], Any], text: str, value: Any
) -> None:
    assert function(text) == value
