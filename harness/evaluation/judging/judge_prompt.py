"""What a judge is told: a system message and a question with places for the parts of a sample."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from espalier.harness.errors import UserError
from espalier.harness.settings import Text, check_keys, read_value
from espalier.harness.store.files.digests import digest

#: A place for a part of a sample. Braces around anything else, as around JSON, stay as they are.
_PLACE = re.compile(r"\{(\w+)\}")

#: The part that no question can do without.
ANSWER = "answer"


@dataclass(frozen=True)
class Words:
    """The words of a judge's prompt.

    Attributes:
        name: what rows call them.
        user: the question, with `{answer}` and other parts of a sample in braces.
        system: the message before it; None: none.
    """

    name: str
    user: str
    system: str | None = None

    @property
    def digest(self) -> str:
        """16 hex digits that change with any letter of the words, and with nothing else."""
        return digest([self.system, self.user])[:16]

    def messages(self, parts: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the chat that asks about one sample. Braces in a part are no places."""
        said = _PLACE.sub(lambda found: parts.get(found[1], found[0]), self.user)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": said}]


def words_of(key: str, table: Mapping[str, Any], name: str | None = None) -> Words:
    """Return the words that a table `{name, system, user}` holds; `name` is what they are called without one.

    Raises:
        UserError: it holds something else, or no place for the answer.
    """
    check_keys(key, table, ("name", "system", "user"))
    called = read_value(f"{key}.name", table.get("name", name), Text)
    user = read_value(f"{key}.user", table.get("user"), Text)
    if ANSWER not in _PLACE.findall(user):
        raise UserError(f"{key}.user has no place for the answer; valid: a text with {{{ANSWER}}}")
    system = read_value(f"{key}.system", table.get("system"), Text | None)
    # A block of YAML ends in a newline that nobody means.
    return Words(called, user.rstrip("\n"), None if system is None else system.rstrip("\n"))


def read_words(path: Path) -> Words:
    """Return the words of the file that `judge.prompt` names; without a name of their own they have the file's.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    key = f"judge.prompt={str(path)!r}"
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise UserError(
            f"{key} cannot be read: {problem}; valid: a YAML file with user and, if wanted, system and name"
        ) from error
    if not isinstance(table, Mapping):
        raise UserError(f"{key} must be a YAML table with user and, if wanted, system and name")
    return words_of(key, {str(name): value for name, value in table.items()}, path.stem)
