"""Run the unit tests of olmOCR-Bench on an answer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from rapidfuzz import fuzz

from espalier.harness.errors import UserError
from espalier.harness.evaluation.scoring.edit_distance import near_matches
from espalier.harness.evaluation.scoring.unittests.equations import has_formula
from espalier.harness.evaluation.scoring.unittests.table_grid import AROUND, Grid, Place, grids

Test = Mapping[str, Any]

#: Share of a cell's characters that must be right, however many edits a test allows.
HALF = 0.5


def passes(test: Test, answer: str) -> bool:
    """Return whether an answer passes a test. No answer makes it raise.

    Formulas are compared as LaTeX (`equations.tokens`); the released evaluation renders them in a browser.

    Raises:
        UserError: the test is of an unknown type or lacks a field.
    """
    check = CHECKS.get(test.get("type", ""))
    if check is None:
        raise UserError(
            f"test {test.get('id')!r}: type={test.get('type')!r}; valid: {', '.join(CHECKS)}"
        )
    try:
        return check(test, answer)
    except KeyError as missing:
        raise UserError(
            f"test {test.get('id')!r} of type {test['type']!r} has no {missing}"
        ) from missing


def has_cell(test: Test, answer: str) -> bool:
    """Return whether a table has a cell, nearly as written, with the neighbours and headings of the test."""
    wanted = {name: plain(test[name]) for name in AROUND if test.get(name)}
    cell, edits = plain(test["cell"]), test.get("max_diffs", 0)
    return any(
        _alike(cell, grid.cells[place].text, edits) and _surrounded(grid, place, wanted, edits)
        for grid in grids(answer)
        for place in grid.cells
    )


def _surrounded(grid: Grid, place: Place, wanted: Mapping[str, str], edits: int) -> bool:
    return all(
        any(
            _alike(words, grid.cells[neighbour].text, edits)
            for neighbour in AROUND[name](grid, place)
        )
        for name, words in wanted.items()
    )


def _alike(wanted: str, cell: str, edits: int) -> bool:
    needed = max(HALF, 1 - edits / max(len(wanted), 1))
    return fuzz.ratio(wanted, plain(cell)) / 100 >= needed


#: Typography without meaning: quotes, dashes, two signs for micro.
PLAIN = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a", "'"),
        **dict.fromkeys("\u201c\u201d\u201e", '"'),
        **dict.fromkeys("\u2013\u2014\u2011\u2012\u2212", "-"),
        "\uff3f": "_",
        "\u00b5": "\u03bc",
    }
)
BOLD = re.compile(r"\*\*(.*?)\*\*")
UNDERLINED = re.compile(r"__(.*?)__")
PAIRED = re.compile(r"(\*\*|__)(.*?)\1")
SLANTED = re.compile(r"(\*|_)(.*?)\1")
#: Scripts and signs that do not occur in the benchmark.
FOREIGN = re.compile(
    "[\u4e00-\u9fff\u3040-\u309f\u30a0-\u30ff\U0001f600-\U0001f64f\U0001f300-\U0001f5ff\U0001f680-\U0001f6ff"
    "\U0001f1e0-\U0001f1ff]"
)
PICTURE = re.compile(r"!\[.*?\]\(.*?\)")
#: Longest n-gram of characters that is checked for repetition, and largest number of repetitions at an answer's end.
NGRAM, REPEATS = 5, 30


def plain(text: str) -> str:
    """Return a text without emphasis and line ends, in NFC, with plain quotes and dashes."""
    text = re.sub(r"<br/?>", " ", text)
    text = re.sub(r"</?[bi]>", "", UNDERLINED.sub(r"\1", BOLD.sub(r"\1", text)))
    text = SLANTED.sub(r"\2", PAIRED.sub(r"\2", text))
    return unicodedata.normalize("NFC", re.sub(r"\s+", " ", text)).translate(PLAIN)


def has_text(test: Mapping[str, Any], answer: str) -> bool:
    """Return whether an answer has a text, nearly as written, at its start or end if the test requires it.

    An answer shorter than the text is compared as a whole: the library searches the shorter of two texts in the longer
    one, so that the released evaluation finds any text in an answer of one blank.
    """
    wanted, page = plain(test["text"]), plain(answer)
    if not test.get("case_sensitive", True):
        wanted, page = wanted.lower(), page.lower()
    alike = fuzz.ratio if len(page) < len(wanted) else fuzz.partial_ratio
    first, last = test.get("first_n"), test.get("last_n")
    if first and last:
        page = page[:first] + page[-last:]
    elif first:
        page = page[:first]
    elif last:
        page = page[-last:]
    return bool(alike(wanted, page) / 100 >= 1 - test.get("max_diffs", 0) / max(len(wanted), 1))


def in_order(test: Mapping[str, Any], answer: str) -> bool:
    """Return whether one text precedes the other somewhere, each within the test's edits."""
    page, edits = plain(answer), test.get("max_diffs", 0)
    before = near_matches(plain(test["before"]), page, edits)
    after = near_matches(plain(test["after"]), page, edits)
    if not before or not after:
        return False
    return min(place.start for place in before) < max(place.start for place in after)


def is_well_formed(test: Mapping[str, Any], answer: str) -> bool:
    """Return whether an answer has words, no foreign script, and no long repetition at its end.

    For a blank page it may have at most `max_length` letters and digits.
    """
    limit = test.get("max_length")
    if limit is not None:
        if test.get("max_length_skips_image_alt_tags"):
            answer = PICTURE.sub("", answer)
        return sum(letter.isalnum() for letter in answer) <= int(limit)
    if not any(letter.isalnum() for letter in answer):
        return False
    limit_of_repeats = test.get("max_repeats", REPEATS)
    if any(_repeats(answer, size) > limit_of_repeats for size in range(1, NGRAM + 1)):
        return False
    return not (test.get("check_disallowed_characters", True) and FOREIGN.search(answer))


def _repeats(answer: str, size: int) -> int:
    """Return how often the last `size` characters repeat at the end."""
    text = re.sub(r"\s+", " ", answer)
    count, place = 0, len(text) - size
    while place >= 0 and text[place : place + size] == text[-size:]:
        count, place = count + 1, place - size
    return count


#: Checks by the type of a test.
CHECKS: dict[str, Callable[[Test, str], bool]] = {
    "present": has_text,
    "absent": lambda test, answer: not has_text(test, answer),
    "order": in_order,
    "table": has_cell,
    "math": lambda test, answer: has_formula(test["math"].strip(), answer),
    "baseline": is_well_formed,
}
