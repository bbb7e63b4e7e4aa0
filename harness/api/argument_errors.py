"""Reword error lines for Python callers: name arguments, not config keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from espalier.harness.errors import Refused, UserError
from espalier.methods.base import MethodError

#: Config keys whose last part is the argument; `model=` and file names such as model.safetensors stay.
_KEY = re.compile(
    r"(?<![\w./-])(?:method\.params\.|method\.(?=draft)|engine\.|(?:(?:model|benchmark)\.)?generation\."
    r"|model\.(?=(?:path|hub|revision|dtype|attention|weights|scale|device|device_map|max_memory|offload|check_weights"
    r"|generation|processor|video|transparency|media|facts|architecture|template|prompts?|join|template_sha256|conversation|drafts|boxes|name|adapter)\b))"
)

#: Config values and their Python spelling.
_VALUES = {"null": "None", "true": "True", "false": "False"}
_VALUE = re.compile(r"(?<![\w./'-])(null|true|false)(?![\w/'-]|\.\w)")

#: Adapters' name for a chat of a batch.
_CHAT = re.compile(r"\bchat (\d+) of the batch(: )?")

#: Text from here on is a shell command and stays as it is.
_COMMAND = "python -m "


@contextmanager
def python_errors(prefix: str = "", questions: int = 0, first: int = 0) -> Iterator[None]:
    """Reword the line of a UserError raised inside the block to name Python arguments.

    Its cause is dropped, unless it is an exception of a method's code.

    Args:
        prefix: text before the line.
        questions: number of questions answered; if more than one, the line names the question.
        first: number of the first question of the current batch.

    Raises:
        UserError: the error raised inside, reworded.
    """
    try:
        yield
    except UserError as error:
        error_class = Refused if isinstance(error, Refused) else UserError
        line = prefix + in_python_terms(str(error), questions, first)
        method_error = error.__cause__ if isinstance(error.__cause__, MethodError) else None
        raise error_class(line) from (method_error and method_error.__cause__)


def in_python_terms(line: str, questions: int = 0, first: int = 0) -> str:
    """Return an error line with Python arguments in place of config keys."""
    message, command, arguments = line.partition(_COMMAND)
    message = _VALUE.sub(lambda match: _VALUES[match[1]], _KEY.sub("", message))

    def chat(match: re.Match[str]) -> str:
        if questions > 1:
            return f"question {first + int(match[1])}{match[2] or ''}"
        return "" if match[2] else "the question"

    return _CHAT.sub(chat, message) + command + arguments
