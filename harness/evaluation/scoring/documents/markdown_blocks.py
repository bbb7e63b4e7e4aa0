"""Split a page of markdown into the blocks that are compared: texts, formulas, tables."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

INLINE = re.compile(r"\$(.*?)\$|\\\((.*?)\\\)")
#: Delimiters of a displayed formula.
BRACKETS = re.compile(r"\\\[(.+?)(?<!\\)\\\]")
NOT_A_LETTER = re.compile(r"[^\w\u4e00-\u9fff]")

GREEK = {
    name: chr(code)
    for name, code in zip(
        [
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "zeta",
            "eta",
            "theta",
            "iota",
            "kappa",
            "lambda",
            "mu",
            "nu",
            "xi",
            "omicron",
            "pi",
            "rho",
            "varsigma",
            "sigma",
            "tau",
            "upsilon",
            "phi",
            "chi",
            "psi",
            "omega",
        ],
        range(0x3B1, 0x3CA),
        strict=True,
    )
}
#: Macros that mean a letter or a word; of other macros only the arguments are kept.
LETTERS = {
    **GREEK,
    **{name.capitalize(): letter.upper() for name, letter in GREEK.items() if name != "varsigma"},
    **{"epsilon": "\u03f5", "varepsilon": "\u03b5", "vartheta": "\u03d1", "phi": "\u03d5"},
    **{
        "varphi": "\u03c6",
        "varrho": "\u03f1",
        "ell": "\u2113",
        "hbar": "\u0127",
        "aleph": "\u2135",
    },
    **{
        name: name
        for name in [
            "sin",
            "cos",
            "tan",
            "sinh",
            "cosh",
            "tanh",
            "arcsin",
            "arccos",
            "arctan",
            "log",
            "ln",
            "exp",
            "lim",
            "limsup",
            "liminf",
            "sup",
            "inf",
            "max",
            "min",
        ]
    },
}
MACRO = re.compile(r"\\([a-zA-Z]+)\*?\s*|\\(.)", re.DOTALL)
SIZED = re.compile(r"\\(?:begin|end)\{[^}]*\}(?:\{[lcr|\s]*\})?|\\[hv]space\*?\{[^}]*\}")

#: Typography that does not matter when formulas are compared, in the order of removal.
DRESS = [
    "\\mathbf",
    "\\mathrm",
    "\\mathnormal",
    "\\mathit",
    "\\mathbb",
    "\\mathcal",
    "\\mathscr",
    "\\mathfrak",
    "\\mathsf",
    "\\mathtt",
    "\\textbf",
    "\\text",
    "\\boldmath",
    "\\boldsymbol",
    "\\operatorname",
    "\\bm",
    "\\symbfit",
    "\\mathbfcal",
    "\\symbf",
    "\\scriptscriptstyle",
    "\\notag",
    "\\setlength",
    "\\coloneqq",
    "\\space",
    "\\thickspace",
    "\\thinspace",
    "\\medspace",
    "\\nobreakspace",
    "\\negmedspace",
    "\\quad",
    "\\qquad",
    "\\enspace",
    "\\substackw",
    "$$",
    "\\left",
    "\\right",
    "\\displaystyle",
]
SILENT = re.compile(r"\\tag\{.*?\}|\\hspace\{.*?\}|\\begin\{.*?\}|\\end\{.*?\}|\\arraycolsep.*?\}")
COLUMN = re.compile(r"\\begin\{array\}\{(?P<columns>[^}]*)\}(?P<body>.*?)\\end\{array\}", re.DOTALL)


def letters(text: str) -> str:
    """Return the compared part of a text: letters, digits and underscores, with formulas as Unicode."""
    text = INLINE.sub(_readable, text)
    for gap in ("\\t", "\\n", "\t", "\n", "/t", "/n"):
        text = text.replace(gap, "")
    return NOT_A_LETTER.sub("", text)


def unicode_text(latex: str) -> str:
    """Return a formula as text: macros become letters or are removed, arguments stay."""
    return MACRO.sub(_letter, SIZED.sub("", latex)).translate({ord(mark): None for mark in "{}$"})


def plain_formula(latex: str) -> str:
    """Return the compared part of a formula: lower case, without spaces, delimiters, environments and typography."""
    latex = latex.strip().strip("$").strip("\n")
    inside = BRACKETS.search(latex)
    if inside:
        latex = inside.group(1).strip()
    latex = SILENT.sub("", latex).strip(".")
    for word in DRESS:
        latex = latex.replace(word, "")
    return latex.replace(" ", "").lower()


def lines_of_column(latex: str) -> list[str] | None:
    """Return the lines of a formula that is an array of one column; None for any other formula."""
    array = COLUMN.search(latex)
    if array is None:
        return None
    columns = re.sub(r"[@!]\{[^}]*\}|[\s|]", "", array["columns"])
    if columns not in ("l", "c", "r"):
        return None
    return [line.strip() for line in re.split(r"\\\\", array["body"]) if line.strip()]


def _readable(inline: re.Match[str]) -> str:
    content = inline.group(1) if inline.group(1) is not None else inline.group(2)
    # An escaped character alone, as in a price, is not a formula.
    if not re.search(r"[\\^_]", re.sub(r"\\([\\_&%^])", "", content)):
        return inline.group(0)
    return unicode_text(content).strip()


def _letter(macro: re.Match[str]) -> str:
    if macro.group(1) is None:
        return macro.group(2) if macro.group(2) in "_&%$#" else ""
    return LETTERS.get(macro.group(1), "")


PICTURE = re.compile(r"!\[.*?\]\(.*?\)")
FENCE = re.compile(r"^```(?:markdown|html|latex)\n?|```\n?$", re.MULTILINE)
PAGE = re.compile(r"</?(?:html|body)>")
LATEX_TABLE = re.compile(
    r"\\begin\{table\}.*?\\end\{table\}|\\begin\{tabular\}.*?\\end\{tabular\}", re.DOTALL
)
TABLE_TAG = re.compile(r"<table[^>]*>|</table>")
MATH = re.compile(r"\$\$(.*?)\$\$|\\\[(.*?)\\\]|\$(.*?)\$|\\\((.*?)\\\)", re.DOTALL)
PIPES = re.compile(r"(?:^[ \t]*\|.*\|[ \t]*(?:\n|\Z)){2,}", re.MULTILINE)
RULE = re.compile(r"[\s|:-]*-[\s|:-]*")
CODE = re.compile(r"```(?:\w+)\n(.*?)```", re.DOTALL)
STYLE = re.compile(r"\\(?:title|text|section)\*?\s*\{\s*(.*?)\s*\}", re.DOTALL)


@dataclass(frozen=True)
class MarkdownBlock:
    """A block of an answer.

    Attributes:
        kind: `text`, `formula`, `inline` (a formula within a text, perhaps meant as displayed), `table` or
            `latex_table`.
        content: the block as written; a table as HTML.
        position: index of its first character.
    """

    kind: str
    content: str
    position: int


def blocks(markdown: str) -> list[MarkdownBlock]:
    """Split an answer into blocks, in the order of their positions. Never raises.

    A formula within a text becomes a block and stays in the text: a page that displays it matches the block, another
    page matches the text.
    """
    page = PAGE.sub("", FENCE.sub("", PICTURE.sub("", markdown)))
    page = re.sub(r" {4,}", "    ", re.sub(r"_{4,}", "____", page))
    result: list[MarkdownBlock] = []
    for table in LATEX_TABLE.finditer(page):
        result.append(MarkdownBlock("latex_table", table.group(0), table.start()))
        page = _blank(page, table.start(), table.end())
    for start, end in _html_tables(page):
        result.append(MarkdownBlock("table", page[start:end], start))
        page = _blank(page, start, end)
    for math in MATH.finditer(page):
        displayed = math.group(1) or math.group(2)
        content = " ".join((displayed or math.group(3) or math.group(4) or "").split("\n"))
        if not content.strip():
            continue
        result.append(
            MarkdownBlock("formula" if displayed else "inline", f"\\[{content}\\]", math.start())
        )
        if displayed:
            page = _blank(page, math.start(), math.end())
    for pipes in PIPES.finditer(page):
        result.append(MarkdownBlock("table", table_of_pipes(pipes.group(0)), pipes.start()))
        page = _blank(page, pipes.start(), pipes.end())
    for code in CODE.finditer(page):
        result.append(MarkdownBlock("text", code.group(1).strip(), code.start()))
        page = _blank(page, code.start(), code.end())
    # Padded to the same length, so that positions stay.
    result += _paragraphs(STYLE.sub(lambda style: style.group(1).ljust(len(style.group(0))), page))
    return sorted(result, key=lambda block: block.position)


def table_of_pipes(text: str) -> str:
    """Return a table written with pipes as HTML."""
    rows = [line.strip().strip("|").split("|") for line in text.strip().splitlines()]
    lines = [
        "".join(f"<td>{html.escape(cell.strip(), quote=False)}</td>" for cell in row)
        for row in rows
        if not RULE.fullmatch("|".join(row))
    ]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _html_tables(page: str) -> Iterator[tuple[int, int]]:
    """Yield complete tables: of nested tables the outermost, of an unclosed table the tables within it."""
    opened: list[int] = []
    inner: list[tuple[int, int]] = []
    for tag in TABLE_TAG.finditer(page):
        if not tag.group(0).startswith("</"):
            opened.append(tag.start())
        elif opened:
            start = opened.pop()
            inner = [*(span for span in inner if span[0] < start), (start, tag.end())]
            if not opened:
                yield from inner
                inner = []
    yield from inner


def _paragraphs(page: str) -> Iterator[MarkdownBlock]:
    gap = "\n\n" if "\n\n" in page else "\n"
    position = 0
    for part in page.split(gap):
        text = "\n".join(line.strip() for line in part.split("\n") if line.strip())
        if text.startswith("$") and text.endswith("$"):
            # A formula alone on its line is displayed, whatever its delimiters.
            if text.strip("$"):
                yield MarkdownBlock("formula", text, position)
        elif text:
            yield MarkdownBlock("text", text, position)
        position += len(part) + len(gap)


def _blank(page: str, start: int, end: int) -> str:
    return page[:start] + " " * (end - start) + page[end:]
