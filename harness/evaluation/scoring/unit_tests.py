"""Compare formulas as LaTeX, without markup that does not change their look."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any

import lxml.html
from lxml import etree
from rapidfuzz import fuzz

from espalier.harness.errors import FOREIGN, UserError
from espalier.harness.evaluation.scoring.documents.markdown_blocks import PICTURE
from espalier.harness.evaluation.scoring.text_scores import near_matches

#: Searched in this order; matches are removed before the next search.
DELIMITED = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (r"\\\((.+?)\\\)", r"\\\[(.+?)\\\]", r"\$\$(.+?)\$\$", r"\$(.+?)\$")
)
TOKEN = re.compile(r"\\[a-zA-Z]+\*?|\\.|\s+|.", re.DOTALL)
#: Commands that look the same.
SAME = {
    "\\le": "\\leq",
    "\\ge": "\\geq",
    "\\ne": "\\neq",
    "\\to": "\\rightarrow",
    "\\gets": "\\leftarrow",
    "\\land": "\\wedge",
    "\\lor": "\\vee",
    "\\lnot": "\\neg",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\dbinom": "\\binom",
    "\\tbinom": "\\binom",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lbrack": "[",
    "\\rbrack": "]",
    "\\lvert": "|",
    "\\rvert": "|",
    "\\vert": "|",
    "\\lVert": "\\|",
    "\\rVert": "\\|",
    "\\Vert": "\\|",
    "\\ast": "*",
    "\\colon": ":",
    "\\ldots": "\\dots",
    "\\dotsc": "\\dots",
    "\\dotso": "\\dots",
    "\\dotsb": "\\cdots",
    "\\implies": "\\Longrightarrow",
    "\\iff": "\\Longleftrightarrow",
    "\\operatorname*": "\\operatorname",
    "\\mathrm": "\\text",
    "\\textrm": "\\text",
    "\\rm": "\\text",
    "\\hbox": "\\text",
    "\\mbox": "\\text",
    "\\bf": "\\mathbf",
    "\\boldsymbol": "\\mathbf",
    "\\bm": "\\mathbf",
    "\\textbf": "\\mathbf",
    "\\prime": "'",
    "\\And": "&",
}
#: Spaces, sizes and hints to the typesetter, which are ignored.
NOTHING = frozenset(
    [
        "\\left",
        "\\right",
        "\\middle",
        "\\big",
        "\\Big",
        "\\bigg",
        "\\Bigg",
        "\\bigl",
        "\\bigr",
        "\\Bigl",
        "\\Bigr",
        "\\biggl",
        "\\biggr",
        "\\Biggl",
        "\\Biggr",
        "\\bigm",
        "\\displaystyle",
        "\\textstyle",
        "\\scriptstyle",
        "\\limits",
        "\\nolimits",
        "\\quad",
        "\\qquad",
        "\\enspace",
        "\\thinspace",
        "\\medspace",
        "\\thickspace",
        "\\nonumber",
        "\\notag",
        "\\relax",
        "\\,",
        "\\;",
        "\\:",
        "\\!",
        "\\>",
        "~",
        "&",
    ]
) | {"\\ "}


def equations(answer: str) -> list[str]:
    """Return the formulas that an answer marks."""
    formulas: list[str] = []
    for pattern in DELIMITED:
        formulas += [formula.strip() for formula in pattern.findall(answer)]
        answer = pattern.sub("", answer)
    return formulas


def tokens(latex: str) -> tuple[str, ...]:
    """Return the tokens of a formula, without spaces, sizes and braces around one token; synonyms become equal.

    Unbalanced braces stay. Cost: O(n).
    """
    sequence = [
        SAME.get(token, token)
        for token in TOKEN.findall(latex)
        if token not in NOTHING and not token.isspace()
    ]
    return tuple(_without_braces(sequence))


def contains(answer: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether `wanted` is a contiguous part of the tokens of `answer`."""
    if not wanted:
        return False
    # Tokens have no control characters, so that a text search finds whole tokens.
    return "\x1f".join(("", *wanted, "")) in "\x1f".join(("", *answer, ""))


def has_formula(wanted: str, answer: str) -> bool:
    """Return whether an answer has a formula, also as part of a longer one."""
    wanted_tokens = tokens(wanted)
    formulas = equations(answer)
    return wanted in formulas or any(
        contains(tokens(formula), wanted_tokens) for formula in formulas
    )


def _without_braces(sequence: Sequence[str]) -> Iterator[str]:
    """Yield tokens without braces around one token, and without groups that no command precedes."""
    opened: list[int] = []
    dropped: set[int] = set()
    for end, token in enumerate(sequence):
        if token == "{":
            opened.append(end)
        elif token == "}" and opened:
            start = opened.pop()
            before = sequence[start - 1] if start else ""
            # After a command, another argument, a script or an option, a group is an argument.
            free = not before.startswith("\\") and before not in ("}", "^", "_", "]")
            if end - start == 2 or free:
                dropped |= {start, end}
    yield from (token for place, token in enumerate(sequence) if place not in dropped)


#: Largest span of a cell; answers may give any number.
WIDEST = 100

Place = tuple[int, int]


@dataclass(frozen=True)
class GridCell:
    """A cell of a table, as written."""

    text: str
    heading: bool = False
    rows: int = 1
    columns: int = 1


@dataclass
class Grid:
    """Cells by the position of their upper left corner; `squares` maps each position to the corner of its cell."""

    cells: dict[Place, GridCell] = field(default_factory=dict)
    squares: dict[Place, Place] = field(default_factory=dict)
    height: int = 0
    width: int = 0

    def neighbours(self, corner: Place, down: int, right: int) -> set[Place]:
        """Return the next cells in a direction, across gaps; a cell that spans several rows may have several."""
        cell = self.cells[corner]
        rows = range(corner[0], corner[0] + (1 if down else cell.rows))
        columns = range(corner[1], corner[1] + (1 if right else cell.columns))
        corners = set()
        for row, column in product(rows, columns):
            while 0 <= (row := row + down) < self.height and (
                0 <= (column := column + right) < self.width
            ):
                neighbour = self.squares.get((row, column))
                if neighbour is not None and neighbour != corner:
                    corners.add(neighbour)
                    break
        return corners

    def headings(self, corner: Place, down: int, right: int) -> set[Place]:
        """Return the headings in a direction; without headings, the last cells in that direction."""
        visited, waiting = set(), {corner}
        heads, ends = set(), set()
        while waiting:
            at = waiting.pop()
            visited.add(at)
            if self.cells[at].heading:
                heads.add(at)
            following = self.neighbours(at, down, right)
            if not following:
                ends.add(at)
            waiting |= following - visited
        return (heads - {corner}) or (ends - {corner})


def grids(answer: str) -> Iterator[Grid]:
    """Yield the tables of an answer, written with pipes or in HTML. Never raises."""
    for is_table, lines in groupby(answer.strip().split("\n"), lambda line: "|" in line):
        table = list(lines)
        rows = [_cells(line) for line in table if not (line.strip() and set(line) <= set("- :|"))]
        if is_table and len(table) >= 2 and any(rows):
            yield laid_out(
                [
                    [
                        GridCell(text, heading=not (number and place))
                        for place, text in enumerate(row)
                    ]
                    for number, row in enumerate(filter(None, rows))
                ]
            )
    yield from _of_html(answer)


def laid_out(rows: Sequence[Sequence[GridCell]]) -> Grid:
    """Return rows of cells as a grid: each cell takes the first free position of its row."""
    grid = Grid()
    for row, cells in enumerate(rows):
        column = 0
        for cell in cells:
            while (row, column) in grid.squares:
                column += 1
            corner = (row, column)
            grid.cells[corner] = cell
            covered = product(range(row, row + cell.rows), range(column, column + cell.columns))
            grid.squares |= dict.fromkeys(covered, corner)
            column += cell.columns
    grid.height = max((row for row, _ in grid.squares), default=-1) + 1
    grid.width = max((column for _, column in grid.squares), default=-1) + 1
    return grid


def _cells(line: str) -> list[str]:
    cells = [cell.strip() for cell in line.split("|")]
    cells = cells[1:] if not cells[0] else cells
    return cells[:-1] if cells and not cells[-1] else cells


def _of_html(answer: str) -> Iterator[Grid]:
    if "<table" not in answer.lower():
        return
    parser = lxml.html.HTMLParser(remove_comments=True, encoding="utf-8")
    try:
        page = lxml.html.fromstring(f"<div>{answer}</div>".encode(errors="replace"), parser=parser)
    except (*FOREIGN, etree.ParserError):
        return
    for table in page.iter("table"):
        lines = list(table.iter("tr"))
        rows = [
            [_cell(cell, len(lines) - number) for cell in line if cell.tag in ("td", "th")]
            for number, line in enumerate(lines)
        ]
        if any(rows):
            yield laid_out(rows)


def _cell(cell: lxml.html.HtmlElement, rows_left: int) -> GridCell:
    for end in cell.iter("br"):
        end.tail = "\n" + (end.tail or "")
    heading = cell.tag == "th" or any(above.tag == "thead" for above in cell.iterancestors())
    rows = rows_left if (cell.get("rowspan") or "").strip() == "0" else _span(cell.get("rowspan"))
    return GridCell(
        cell.text_content().strip(), heading, min(rows, WIDEST), _span(cell.get("colspan"))
    )


def _span(value: str | None) -> int:
    digits = (value or "").strip()
    return min(max(int(digits), 1), WIDEST) if digits.isascii() and digits.isdigit() else 1


#: Fields of a test about a cell's surroundings, and the cells that they refer to.
Look = Callable[[Grid, Place], set[Place]]
AROUND: dict[str, Look] = {
    "up": lambda grid, at: grid.neighbours(at, -1, 0),
    "down": lambda grid, at: grid.neighbours(at, 1, 0),
    "left": lambda grid, at: grid.neighbours(at, 0, -1),
    "right": lambda grid, at: grid.neighbours(at, 0, 1),
    "top_heading": lambda grid, at: grid.headings(at, -1, 0),
    "left_heading": lambda grid, at: grid.headings(at, 0, -1),
}


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
DISALLOWED = re.compile(
    "[\u4e00-\u9fff\u3040-\u309f\u30a0-\u30ff\U0001f600-\U0001f64f\U0001f300-\U0001f5ff\U0001f680-\U0001f6ff"
    "\U0001f1e0-\U0001f1ff]"
)
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
    if first or last:
        page = (page[:first] if first else "") + (page[-last:] if last else "")
    return bool(alike(wanted, page) / 100 >= 1 - test.get("max_diffs", 0) / max(len(wanted), 1))


def in_order(test: Mapping[str, Any], answer: str) -> bool:
    """Return whether one text precedes the other somewhere, each within the test's edits."""
    page, edits = plain(answer), test.get("max_diffs", 0)
    before = near_matches(plain(test["before"]), page, edits)
    after = near_matches(plain(test["after"]), page, edits)
    starts, ends = ([place.start for place in places] for places in (before, after))
    return bool(starts and ends) and min(starts) < max(ends)


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
    return not (test.get("check_disallowed_characters", True) and DISALLOWED.search(answer))


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
