r"""Answers to mathematics problems: the value that an answer states, and whether two values are the same.

A value is a text, a number in LaTeX or plain writing (`\frac34`, `2\sqrt{3}`, `1,000`, `75\%`, `12 cm`), or several.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import accumulate

#: Longer texts are no numbers: this also bounds the depth of brackets.
LONGEST = 100
#: Words of a value that stands alone, without a box or a phrase before it.
FEW = 4

#: Writings of one thing, in order: the first becomes the second.
WRITINGS = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\\[!,;:> ()\[\]]|~|\\(?:left|right|displaystyle|quad|qquad)\b|\\?\$", " "),
        (r"\\\{", "("),
        (r"\\\}", ")"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\u00b0|\\degree\b|\\?%", " "),
        (r"\u2212|\u2013", "-"),
        (r"\\(?:times|cdot)\b|\u00d7|\u00b7", "*"),
        (r"\\div\b|\u00f7|\u2215", "/"),
        (r"\u03c0", r"\\pi "),
        (r"\u221a", r"\\sqrt "),
        (r"\u00b2", "^2"),
        (r"\u00b3", "^3"),
        (r"\{,\}", ","),
        (r"(?<![\d,])(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda mark: mark[1].replace(",", "")),
    )
)
RELATION = re.compile(r"=|\\approx\b|\u2248")
#: A unit after a number: words, perhaps with an exponent.
UNIT = re.compile(r"(?<=[\d})\]])\s+[A-Za-z][A-Za-z ./]*(?:\^\s*\{?\d\}?)?\s*$")
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")

BOX = "boxed{"
PHRASE = re.compile(
    r"(?i:\b(?:answer|result)(?:\s+(?:is|should\s+be|would\s+be|must\s+be)\b|\s*[:=])[\s:]*)([^\n]+)"
)
LINK = re.compile(r"(?i:\b(?:is|are|equals|therefore|thus|hence|so)\b,?)|=|:\s")
#: What ends a sentence is no decimal point.
STOP = re.compile(r"[.!?](?=\s|$)")
MARKUP = re.compile(r"[*_`]{2,}|`")


def stated_value(answer: str) -> str:
    """Return the value that an answer states, "" if none: the last box, else after "the answer is", else all of it.

    An answer without box and phrase states a value if it is a few words, or ends in a number ("so it is 12.").
    """
    text = MARKUP.sub("", answer).strip()
    if BOX in text:
        return _group(text.rpartition(BOX)[2]).strip()
    phrases = PHRASE.findall(text)
    if phrases:
        return STOP.split(str(phrases[-1]))[0].strip()
    last_line = text.rpartition("\n")[2].strip().rstrip(".")
    tail = LINK.split(last_line)[-1].strip()
    if number(tail) is not None:
        return tail
    return text if len(text.split()) <= FEW and any(map(str.isalnum, text)) else ""


def same_value(first: str, second: str) -> bool:
    """Return whether two values are the same text, the same number, or the same numbers in a row."""
    if _letters(first) == _letters(second) != "":
        return True
    members = [[number(part) for part in _parts(text)] for text in (first, second)]
    return len(members[0]) == len(members[1]) and all(
        value is not None and reference is not None and math.isclose(value, reference, rel_tol=1e-9)
        for value, reference in zip(*members, strict=True)
    )


def number(text: str) -> float | None:
    """Return the number that a text writes, None if it writes none."""
    plain = UNIT.sub("", RELATION.split(_plain(text))[-1]).strip()
    if not plain or len(plain) > LONGEST:
        return None
    try:
        return _Arithmetic(plain).value()
    except (ValueError, ArithmeticError):
        return None


def _plain(text: str) -> str:
    for pattern, instead in WRITINGS:
        text = pattern.sub(instead, text)
    return text.strip().rstrip(".")


def _letters(text: str) -> str:
    return re.sub(r"\s", "", RELATION.split(_plain(text))[-1]).casefold()


def _parts(text: str) -> list[str]:
    """Return the members of a tuple or a list, the text alone if it is none."""
    plain = _plain(text)
    bracketed = re.fullmatch(r"[({\[](.*?,.*)[)}\]]", plain)
    return (bracketed[1] if bracketed else plain).split(",")


def _group(text: str) -> str:
    """Return a text up to the brace that closes it; "" without one."""
    depths = accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in text)
    return text[: next((place for place, depth in enumerate(depths) if depth < 0), 0)]


@dataclass
class _Arithmetic:
    r"""Numbers with + - * /, powers, fractions, roots, brackets and \pi; factors may stand side by side."""

    _text: str

    def value(self) -> float:
        """Return the value of the whole text; raises ValueError or ArithmeticError if it has none."""
        value = self._sum()
        if self._text or not math.isfinite(value):
            raise ValueError
        return value

    def _takes(self, *words: str) -> str:
        """Take one of some words from the beginning of what is left, "" if it begins otherwise."""
        self._text = self._text.lstrip()
        word = next((word for word in words if self._text.startswith(word)), "")
        self._text = self._text[len(word) :]
        return word

    def _sum(self) -> float:
        total = self._product()
        while sign := self._takes("+", "-"):
            total += self._product() if sign == "+" else -self._product()
        return total

    def _product(self) -> float:
        value = self._factor()
        while self._text.lstrip()[:1] not in ("", "+", "-", ")", "}", "]", "|"):
            if self._takes("/"):
                value /= self._factor()
            elif self._takes("*") or not self._text[0].isdigit():
                value *= self._factor()
            else:
                raise ValueError
        return value

    def _factor(self) -> float:
        if sign := self._takes("+", "-"):
            return self._factor() if sign == "+" else -self._factor()
        value = self._atom()
        if self._takes("^"):
            value **= self._argument()
        if isinstance(value, complex):
            raise ValueError
        return value

    def _atom(self) -> float:
        if self._takes(r"\frac"):
            return self._argument() / self._argument()
        if self._takes(r"\sqrt"):
            degree = self._closed("]") if self._takes("[") else 2.0
            value = self._argument()
            if value < 0 and degree % 2 == 1:
                return -float((-value) ** (1 / degree))
            if value < 0:
                raise ValueError
            return float(value ** (1 / degree))
        if self._takes(r"\pi"):
            return math.pi
        if bracket := self._takes("(", "{", "["):
            return self._closed({"(": ")", "{": "}", "[": "]"}[bracket])
        digits = NUMBER.match(self._text)
        if digits is None:
            raise ValueError
        self._text = self._text[digits.end() :]
        mixed = "." not in digits[0] and re.match(r"\s*\\frac\s*\{?\d+\}?\s*\{?\d+\}?", self._text)
        return float(digits[0]) + (self._atom() if mixed else 0)

    def _closed(self, bracket: str) -> float:
        value = self._sum()
        if not self._takes(bracket):
            raise ValueError
        return value

    def _argument(self) -> float:
        """Return what a command takes: a group, a command, or a single digit."""
        self._text = self._text.lstrip()
        if self._text[:1] in ("{", "\\", "-"):
            return self._factor()
        digit, self._text = self._text[:1], self._text[1:]
        return float(digit)
