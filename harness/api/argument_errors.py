"""Error lines in the words of Python: arguments that somebody gave, not config keys that nobody typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from espalier.harness.errors import Refused, UserError

#: Config keys whose last part is the argument; `model=` and file names such as model.safetensors stay.
_KEY = re.compile(
    r"(?<![\w./-])(?:method\.params\.|method\.(?=draft)|engine\.|(?:(?:model|benchmark)\.)?generation\."
    r"|model\.(?=(?:path|hub|revision|dtype|attention|weights|scale|device|device_map|max_memory|offload|check_weights"
    r"|generation|processor|video|transparency|media|facts|architecture|template|prompts?|join|template_sha256|conversation|drafts|boxes|name|adapter)\b))"
)

#: What values are called.
_VALUES = {"null": "None", "true": "True", "false": "False"}
_VALUE = re.compile(r"(?<![\w./'-])(null|true|false)(?![\w/'-]|\.\w)")

#: How an adapter names a chat of its batch.
_CHAT = re.compile(r"\bchat (\d+) of the batch(: )?")

#: Commands stay as the shell takes them.
_COMMAND = "python -m "


@contextmanager
def in_words_of_python(before: str = "", questions: int = 0, first: int = 0) -> Iterator[None]:
    """Let errors name arguments of Python.

    Args:
        before: stands before the line.
        questions: how many are answered; of several, the line says which one it was.
        first: number of the first one of the batch at hand.

    Raises:
        UserError: what was raised inside, with its line reworded.
    """
    try:
        yield
    except UserError as error:
        kind = Refused if isinstance(error, Refused) else UserError
        raise kind(before + reworded(str(error), questions, first)) from None


def reworded(line: str, questions: int = 0, first: int = 0) -> str:
    """Return an error line with the arguments of Python in place of config keys."""
    said, command, rest = line.partition(_COMMAND)
    said = _VALUE.sub(lambda found: _VALUES[found[1]], _KEY.sub("", said))

    def chat(found: re.Match[str]) -> str:
        if questions > 1:
            return f"question {first + int(found[1])}{found[2] or ''}"
        return "" if found[2] else "the question"

    return _CHAT.sub(chat, said) + command + rest
