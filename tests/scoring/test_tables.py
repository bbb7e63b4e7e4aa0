"""Similarity of tables: against a plain tree distance, by hand, and on what is no table."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zss import Node, distance

from espalier.harness.evaluation.scoring.documents.omnidoc_page import (
    normalised_table,
    table_cells,
    table_similarity,
)
from tests.scoring.test_edits import plain

ROWS = st.lists(st.lists(st.text("ab", max_size=2), min_size=1, max_size=3), min_size=1, max_size=3)


def html(rows: Sequence[Sequence[str]]) -> str:
    return (
        "<table>"
        + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        + "</table>"
    )


def tree(rows: Sequence[Sequence[str]]) -> Node:
    root = Node(("table", ""))
    for row in rows:
        line = Node(("tr", ""))
        for cell in row:
            line.addkid(Node(("td", cell)))
        root.addkid(line)
    return root


def cost(element: object, other: object) -> float:
    """Return what it costs to turn one element into the other; into or from nothing, 1."""
    if not element or not other:
        return 1.0
    assert isinstance(element, tuple)
    assert isinstance(other, tuple)
    if element[0] != other[0]:
        return 1.0
    longer = max(len(element[1]), len(other[1]))
    return plain(element[1], other[1]) / longer if longer else 0.0


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(ROWS, ROWS)
def test_similarity_is_one_minus_the_tree_distance_over_the_elements(
    answer: list[list[str]], right: list[list[str]]
) -> None:
    bare = [[[""] * len(row) for row in rows] for rows in (answer, right)]
    elements = max(sum(1 + len(row) for row in rows) for rows in (answer, right))
    for similarity, trees in zip(
        table_similarity(html(answer), html(right)), ((answer, right), bare), strict=True
    ):
        far = distance(
            *map(tree, trees),
            Node.get_children,
            lambda n: 1,
            lambda n: 1,
            lambda a, b: cost(a.label, b.label),
        )
        assert similarity == pytest.approx(max(0.0, 1 - far / elements))


def test_similarity_by_hand() -> None:
    right = html([["a", "b"], ["c", "d"]])
    assert table_similarity(right, right) == (1, 1)
    # One cell of six elements is another.
    assert table_similarity(html([["a", "b"], ["c", "x"]]), right) == (pytest.approx(5 / 6), 1)
    # A row of three elements is missing.
    assert table_similarity(html([["a", "b"]]), right) == pytest.approx((0.5, 0.5))
    # A span that is not there: one element of five; without it a cell more.
    wide = '<table><tr><td colspan="2">a</td></tr><tr><td>c</td><td>d</td></tr></table>'
    assert table_similarity(wide.replace(' colspan="2"', ""), wide) == pytest.approx((0.8, 0.8))


@pytest.mark.parametrize(
    "same",
    [
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>c</td><td>d</td></tr></tbody></table>",
        '<table border="1" class="x"><tr style="k"><td align="left">a</td><td><p>b</p></td></tr>'
        "<tr><td>c</td><td>d</td></tr></table>",
        "<div><table>\n<tr>\n<td>a</td><td>\uff42</td></tr><tr><td><span>c</span></td><td>d</td>",
    ],
)
def test_how_a_table_is_written_does_not_count(same: str) -> None:
    if "</table>" not in same:
        same += "</tr></table></div>"
    assert table_similarity(same, html([["a", "b"], ["c", "d"]]))[1] == pytest.approx(1, abs=0.15)
    assert "<th" not in normalised_table(same)
    assert "thead" not in normalised_table(same)


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "   \n",
        "no table",
        "<table>",
        "</table>",
        "<table></table>",
        "<table><tr><td colspan='many'>a</td></tr></table>",
        "<table><tr><td>a<td>b<tr></table",
        "<table><tr><td>&#0;\x00</td></tr></table>",
        "\ud800<table><tr><td>\udfff</td></tr></table>",
        "<" * 1000,
    ],
)
def test_what_is_no_table_is_wrong_and_raises_nothing(broken: str) -> None:
    full, bare = table_similarity(broken, html([["apple", "3"], ["pear", "14"]]))
    assert 0 <= full <= bare < 0.7
    assert isinstance(table_cells(broken), list)


def test_a_table_that_never_ends_costs_little_and_is_worth_nothing() -> None:
    endless = html([["0"] * 20] * 1000)
    start = time.process_time()
    assert table_similarity(endless, html([["a", "b"], ["c", "d"]])) == (0, 0)
    assert time.process_time() - start < 5


def test_cells_are_the_texts_of_a_table() -> None:
    assert table_cells(html([["a", ""], [" c ", "d"]])) == ["a", "c", "d"]
