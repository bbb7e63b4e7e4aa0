"""Compare formulas as LaTeX, without markup that does not change their look."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
    partner = _partners(sequence)
    dropped: set[int] = set()
    for start, end in partner.items():
        inside = end - start - 1
        before = sequence[start - 1] if start else ""
        # After a command, another argument, a script or an option, a group is an argument.
        free = not before.startswith("\\") and before not in ("}", "^", "_", "]")
        if inside == 1 or free:
            dropped |= {start, end}
    for place, token in enumerate(sequence):
        if place not in dropped:
            yield token


def _partners(sequence: Sequence[str]) -> dict[int, int]:
    opened: list[int] = []
    partner = {}
    for place, token in enumerate(sequence):
        if token == "{":
            opened.append(place)
        elif token == "}" and opened:
            partner[opened.pop()] = place
    return partner
