"""The reasoning that an answer may begin with, between tags: it is kept, and not scored."""

from __future__ import annotations

import re

#: Templates may write the first tag into the prompt, so that an answer has the second one alone.
BEGINS, ENDS = (re.compile(f"<{slash}think(?:ing)?>", re.IGNORECASE) for slash in ("", "/"))


def spoken(text: str) -> str:
    """Return what an answer holds after its reasoning: all of it where it has none, "" where that never ends."""
    answer = ENDS.split(text)[-1]
    return "" if BEGINS.search(answer) else answer
