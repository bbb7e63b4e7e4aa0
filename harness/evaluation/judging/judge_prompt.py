"""A judge's prompt, a system message and a question with placeholders; the questions and results of a round."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from espalier.harness.errors import UserError, foreign
from espalier.harness.settings import Text, check_keys, read_value
from espalier.harness.store.answer_digest import Key
from espalier.harness.store.files.digests import digest

#: A placeholder for a part of a sample. Other braces, such as those of JSON, stay.
_PLACE = re.compile(r"\{(\w+)\}")

#: The part that every question needs.
ANSWER = "answer"


@dataclass(frozen=True)
class JudgePrompt:
    """A judge's prompt.

    Attributes:
        name: its name in results.
        user: the question, with `{answer}` and other parts of a sample in braces.
        system: the message before it; None: none.
    """

    name: str
    user: str
    system: str | None = None

    @property
    def digest(self) -> str:
        """16 hex digits that depend on the texts only."""
        return digest([self.system, self.user])[:16]

    def messages(self, parts: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the chat about one sample. Braces inside a part are not placeholders."""
        user = _PLACE.sub(lambda place: parts.get(place[1], place[0]), self.user)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": user}]


@dataclass(frozen=True)
class JudgeQuestion:
    """A question to the judge about one sample.

    Attributes:
        sample: identity of the sample.
        prompt: the prompt.
        parts: texts for its placeholders.
        holds: returns whether a text is a verdict that can be scored.
    """

    sample: Key
    prompt: JudgePrompt
    parts: Mapping[str, str]
    holds: Callable[[str], bool]


@dataclass
class JudgeResults:
    """Results of a round of questions.

    Attributes:
        verdicts: texts by sample.
        unjudged: samples without a verdict, each with the reason in one line.
        cached: number of verdicts from the store.
        failed: number of failed requests, repeated or not.
        served: the server's names of its model.
    """

    verdicts: dict[Key, str] = field(default_factory=dict)
    unjudged: dict[Key, str] = field(default_factory=dict)
    cached: int = 0
    failed: int = 0
    served: set[str] = field(default_factory=set)


def prompt_of(key: str, table: Mapping[str, Any], name: str | None = None) -> JudgePrompt:
    """Return the prompt in a table `{name, system, user}`; `name` is the default name.

    Raises:
        UserError: it holds something else, or has no placeholder for the answer.
    """
    check_keys(key, table, ("name", "system", "user"))
    prompt_name = read_value(f"{key}.name", table.get("name", name), Text)
    user = read_value(f"{key}.user", table.get("user"), Text)
    if ANSWER not in _PLACE.findall(user):
        raise UserError(f"{key}.user has no place for the answer; valid: a text with {{{ANSWER}}}")
    system = read_value(f"{key}.system", table.get("system"), Text | None)
    # A block of YAML ends in a newline.
    return JudgePrompt(
        prompt_name, user.rstrip("\n"), None if system is None else system.rstrip("\n")
    )


def read_prompt(path: Path) -> JudgePrompt:
    """Return the prompt in the file that `judge.prompt` names; its default name is that of the file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    key = f"judge.prompt={str(path)!r}"
    with foreign(f"{key} cannot be read", "a YAML file with user and, if wanted, system and name"):
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(table, Mapping):
        raise UserError(f"{key} must be a YAML table with user and, if wanted, system and name")
    return prompt_of(key, {str(name): value for name, value in table.items()}, path.stem)
