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
def python_errors(prefix: str = "", questions: int = 0, first: int = 0) -> Iterator[None]:
    """Let errors name arguments of Python.

    Args:
        prefix: stands before the line.
        questions: how many are answered; of several, the line says which one it was.
        first: number of the first one of the batch at hand.

    Raises:
        UserError: what was raised inside, with its line in_python_terms.
    """
    try:
        yield
    except UserError as error:
        error_class = Refused if isinstance(error, Refused) else UserError
        raise error_class(prefix + in_python_terms(str(error), questions, first)) from None


def in_python_terms(line: str, questions: int = 0, first: int = 0) -> str:
    """Return an error line with the arguments of Python in place of config keys."""
    message, command, arguments = line.partition(_COMMAND)
    message = _VALUE.sub(lambda match: _VALUES[match[1]], _KEY.sub("", message))

    def chat(match: re.Match[str]) -> str:
        if questions > 1:
            return f"question {first + int(match[1])}{match[2] or ''}"
        return "" if match[2] else "the question"

    return _CHAT.sub(chat, message) + command + arguments
