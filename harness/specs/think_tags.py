"""The reasoning that an answer may begin with, between tags: it is kept in the journal, and by default not scored."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Templates may write the first tag into the prompt; the answer is then completed with it (`opened_by`).
BEGINS, ENDS = (re.compile(f"<{slash}think(?:ing)?>", re.IGNORECASE) for slash in ("", "/"))

#: Values of `generation.thinking` besides `budget:N`.
MODES = ("strip", "keep", "off")

#: The smallest budget: the closing tag is part of it, up to 13 tokens of a tokenizer of bytes.
LEAST_BUDGET = 16


@dataclass(frozen=True)
class Thinking:
    """The setting `generation.thinking`: what prompts ask for, and what is scored.

    Attributes:
        prompted: the value of `enable_thinking` for the chat template; None: the template's default.
        scores_all: whether the reasoning is scored as a part of the answer.
        budget: the largest number of tokens of reasoning, closing tag included; None: unlimited.
    """

    prompted: bool | None = None
    scores_all: bool = False
    budget: int | None = None

    @classmethod
    def of(cls, value: object) -> Thinking | None:
        """Return the meaning of a setting, the default for None; None for an invalid value."""
        if value is None:
            return cls()
        if value in MODES:
            return cls(prompted=value != "off", scores_all=value == "keep")
        number = re.fullmatch(r"budget:(\d+)", str(value))
        budget = 0 if number is None else int(number[1])
        return cls(prompted=True, budget=budget) if budget >= LEAST_BUDGET else None


def spoken(text: str) -> str:
    """Return what an answer holds after its reasoning: all of it where it has none, "" where that never ends.

    Reasoning begins an answer; a tag in the middle of a text, such as one read off a picture, is a part of it.
    """
    answer = ENDS.split(text)[-1]
    return "" if BEGINS.match(answer.lstrip()) else answer


def opened_by(prompt: str) -> str:
    """Return the tag of a reasoning that a prompt opens and leaves open, with the text after it; "" without one."""
    tags = list(BEGINS.finditer(ENDS.split(prompt)[-1]))
    return tags[-1][0] if tags else ""
