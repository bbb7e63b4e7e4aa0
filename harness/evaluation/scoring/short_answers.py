"""Scores of short answers against one reference: equal, contained, near in letters (ANLS), near as a number."""

from __future__ import annotations

import re
import string
import unicodedata

from espalier.harness.evaluation.scoring.edit_distance import normalised_distance

#: Signs at the ends of an answer that do not count.
ENDS = string.punctuation + string.whitespace + "。、·\u201c\u201d\u2018\u2019"

#: ANLS of answers that are farther from the reference than this is 0 (DocVQA, arXiv 2007.00398).
FARTHEST = 0.5


def plain_answer(text: str) -> str:
    """Return a text in small letters, with single blanks, without punctuation at its ends."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    # A text of signs alone is itself.
    return " ".join(words).strip(ENDS) or " ".join(words)


def equal(answer: str, reference: str) -> bool:
    """Return whether two texts are equal but for case, blanks and punctuation at the ends."""
    return plain_answer(answer) == plain_answer(reference)


def contains(answer: str, reference: str) -> bool:
    """Return whether an answer contains a reference as whole words; case and blanks do not count."""
    sought, text = plain_answer(reference), plain_answer(answer)
    if not sought.isascii():
        # Chinese and Japanese words have no blanks between them.
        return sought in text
    return re.search(rf"(?<!\w){re.escape(sought)}(?!\w)", text) is not None


def anls(answer: str, reference: str) -> float:
    """Return one minus the normalised edit distance of two texts in small letters, 0 below a half."""
    texts = (" ".join(text.strip().lower().split()) for text in (answer, reference))
    distance = normalised_distance(*texts)
    return 1 - distance if distance < FARTHEST else 0.0


def within(number: float, reference: float, relative: float, absolute: float) -> bool:
    """Return whether a number is within a tolerance of its reference, both ends included.

    Args:
        number: of the answer.
        reference: the right one.
        relative: share of the reference's size.
        absolute: in the reference's unit; the larger tolerance counts.
    """
    tolerance = max(relative * abs(reference), absolute)
    # Decimal fractions have rounding errors as binary numbers.
    return abs(number - reference) <= tolerance + 1e-9 * max(1.0, abs(reference))
