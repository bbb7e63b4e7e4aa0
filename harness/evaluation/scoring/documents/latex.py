"""Normalise LaTeX: to the letters and digits that a reader sees, or to a formula without typography."""

from __future__ import annotations

import re

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


def formula(latex: str) -> str:
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
