"""Edit distances and near matches against the plain table, on generated texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.harness.evaluation.scoring.text_scores import (
    NearMatch,
    near_matches,
    normalised_distance,
    window_distance,
)

TEXTS = st.text("ab \u4eca", max_size=12)


def table(text: str, other: str) -> list[list[int]]:
    """Return the whole table of edit distances between prefixes, cell by cell."""
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(text, start=1):
        row = [i]
        for j, second in enumerate(other, start=1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != second)))
        rows.append(row)
    return rows


def plain(text: str, other: str) -> int:
    return table(text, other)[-1][-1]


@given(TEXTS, TEXTS)
def test_a_distance_is_the_plain_one_over_the_longer_text(text: str, other: str) -> None:
    longer = max(len(text), len(other))
    assert normalised_distance(text, other) == pytest.approx(
        plain(text, other) / longer if longer else 0
    )


@given(TEXTS, TEXTS, st.sampled_from((0.4, 0.6, 1.1)))
def test_a_window_is_the_nearest_of_its_length(part: str, whole: str, below: float) -> None:
    size = len(part)
    nearest = [
        plain(part, whole[at : at + size]) / size for at in range(len(whole) - size + 1) if size
    ]
    wanted = min(nearest, default=1.0)
    distance = window_distance(part, whole, below)
    assert distance == pytest.approx(wanted if wanted < below else 1.0)


@given(st.text("ab ", min_size=1, max_size=6), TEXTS, st.integers(0, 2))
def test_near_matches_are_found_where_the_plain_search_finds_one(
    pattern: str, text: str, edits: int
) -> None:
    costs = {
        start: min(plain(pattern, text[start:end]) for end in range(start, len(text) + 1))
        for start in range(len(text))
    }
    matches = near_matches(pattern, text, edits)
    assert bool(matches) == any(cost <= edits for cost in costs.values())
    assert all(place.edits == costs[place.start] <= edits for place in matches)
    assert matches == sorted(matches, key=lambda place: place.start)
    if matches:
        assert min(place.edits for place in matches) == min(costs.values())


@pytest.mark.parametrize(
    ("function", "arguments", "value"),
    [
        (normalised_distance, ("kitten", "sitting"), pytest.approx(3 / 7)),
        (normalised_distance, ("", "abc"), 1),
        (normalised_distance, ("", ""), 0),
        # A window at the bound is too far.
        (window_distance, ("abcde", "abcxy", 0.4), 1),
        (window_distance, ("abcde", "abcxy", 0.41), pytest.approx(0.4)),
        # Of places that overlap the best counts.
        (
            near_matches,
            ("brown fox", "a brown fox and a brwn fox", 2),
            [NearMatch(2, 0), NearMatch(18, 1)],
        ),
        (near_matches, ("aa", "aaa", 0), [NearMatch(0, 0), NearMatch(1, 0)]),
        (near_matches, ("", "abc", 1), []),
        (near_matches, ("abcabc", "", 2), []),
    ],
)
def test_edits_by_hand(
    function: Callable[..., Any], arguments: tuple[Any, ...], value: Any
) -> None:
    assert function(*arguments) == value


@pytest.mark.slow
def test_long_texts_take_little_time() -> None:
    # A hundred thousand characters, none of which is far from a match.
    assert len(near_matches("ab" * 50, "ba" * 50_000, 4)) >= 1
