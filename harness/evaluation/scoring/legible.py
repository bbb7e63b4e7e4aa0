"""Whether an answer says anything at all: text beyond special tokens and signs that does not turn in a circle."""

from __future__ import annotations

import re

#: Special tokens as tokenizers write them, such as <|im_end|>, </s>, <loc_16> and [PAD].
SPECIAL = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z]{2,}\d*\]")

#: A text of this many words, or letters of its only word, is a loop if each occurs ten times on average.
LONG, OFTEN = 20, 10
#: So many equal words alone are a loop.
EQUAL = 4

#: The most words of a short answer: several times the longest reference of data sets that ask for a word or phrase.
MOST_WORDS = 30


def has_words(answer: str) -> bool:
    """Return whether an answer has a letter or a digit outside of special tokens."""
    return any(map(str.isalnum, SPECIAL.sub(" ", answer)))


def is_legible(answer: str) -> bool:
    """Return whether an answer has a letter or a digit outside of special tokens, and is no loop."""
    if not has_words(answer):
        return False
    words = SPECIAL.sub(" ", answer).casefold().split()
    units = words if len(words) > 1 else list(words[0])
    loops = len(units) >= LONG and OFTEN * len(set(units)) <= len(units)
    return not loops and not (len(words) >= EQUAL and len(set(words)) == 1)


def is_brief(answer: str) -> bool:
    """Return whether an answer is legible and has at most MOST_WORDS words."""
    return is_legible(answer) and len(answer.split()) <= MOST_WORDS
