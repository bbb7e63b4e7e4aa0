"""The references of records: which score they are for, and whether each can be scored by it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from espalier.harness.errors import UserError, near_names
from espalier.harness.specs.records.record import Mistakes, Record

#: Columns of references.
ANSWERS = ("answer", "answers")

YES_NO = ("yes", "no")

#: A number with a sign, thousands separators, a fraction or an exponent; currency and percent signs are units.
NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])"
)


def chosen_score(
    records: Sequence[Record], score: str | None, columns: Sequence[str], bare: bool, source: str
) -> tuple[str, str]:
    """Return the score of records and why it was chosen ("" for the user's own).

    Args:
        records: all of them.
        score: the user's choice; None: by the columns.
        columns: names of the columns.
        bare: whether the records are files without a table.
        source: the config key with the file, for the error line.

    Raises:
        UserError: there are no answers, and the user did not choose `none`.
    """
    if score is not None:
        return score, ""
    if bare:
        return "none", "there are files without answers"
    if not any(column in ANSWERS for column in columns):
        raise UserError(
            f"{source} has no column answer or answers{near_names('answer', columns, 1)}; valid: that column, or "
            "benchmark.score=none, which stores answers without a score"
        )
    if any(record.choices for record in records):
        return "choice", "the records have choices"
    answers = [answer for record in records for answer in record.answers]
    if answers and all(plain_yes_no(answer) for answer in answers):
        return "yes_no", "all answers are yes or no"
    return "exact", "the records have answers and no choices"


def check_references(records: Iterable[Record], score: str, mistakes: Mistakes) -> None:
    """Note each record without an answer that its score can use."""
    if score == "none":
        return
    for record in records:
        problem = _problem(record, score)
        if problem:
            mistakes.add(record.place, problem)


def options_of(choices: Sequence[str]) -> dict[str, str]:
    """Return choices by letter; empty ones are missing."""
    return {chr(65 + place): text for place, text in enumerate(choices) if text}


def right_letter(answer: str, options: Mapping[str, str]) -> str:
    """Return the letter of a reference, which is a letter or the text of a choice; "" if it is neither."""
    letter = answer.strip().strip("().:").upper()
    if letter in options:
        return letter
    letters = [
        name
        for name, text in options.items()
        if text.strip().casefold() == answer.strip().casefold()
    ]
    return letters[0] if len(letters) == 1 else ""


def plain_yes_no(answer: str) -> str:
    """Return yes or no for a reference that is one of these words, else ""."""
    word = answer.strip().rstrip(".").casefold()
    return word if word in YES_NO else ""


def numbers(text: str) -> list[float]:
    """Return the numbers of a text; `1,200` is one of them, and `3a` holds none."""
    matches = (match[0] for match in NUMBER.finditer(text) if any(c.isdigit() for c in match[0]))
    return [float(number.replace(",", "").replace("\u2212", "-")) for number in matches]


def _problem(record: Record, score: str) -> str:
    """Return the fault of a record's reference; "" if it can be scored."""
    if not record.answers:
        return "no answer; valid: a text in the column answer, or benchmark.score=none"
    if score == "choice":
        if not record.choices:
            return "no choices; valid: choices for every record, or benchmark.score=exact"
        options = options_of(record.choices)
        wrong = [answer for answer in record.answers if not right_letter(answer, options)]
        listed = ", ".join(f"{letter} ({text[:30]})" for letter, text in options.items())
        return f"answer {wrong[0]!r} is none of the choices; valid: {listed}" if wrong else ""
    if score == "yes_no":
        wrong = [answer for answer in record.answers if not plain_yes_no(answer)]
        return f"answer {wrong[0]!r}; valid: yes or no, or benchmark.score=exact" if wrong else ""
    if score == "number":
        wrong = [answer for answer in record.answers if len(numbers(answer)) != 1]
        return f"answer {wrong[0]!r} is no number; valid: one number" if wrong else ""
    return ""
