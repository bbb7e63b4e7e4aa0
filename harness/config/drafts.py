"""The draft model of a run: its config file with the user's options on it, and error lines that name their keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.config import fields
from harness.errors import Refused, UserError

#: A key of the model section in an error line; neither `model.safetensors` nor a directory of that name.
_KEY = re.compile(
    r"(?<![\w./-])model\.(?=(?:path|hub|revision|dtype|attention|weights|scale|device|device_map|max_memory|"
    r"check_weights|generation|processor|video|media|facts|architecture|template|conversation|drafts|name|adapter)\b)"
)
_NAME = re.compile(r"(?<![\w./-])model=")


def with_options(part: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section `part` with `method.draft_options` laid over it, tables key by key.

    Raises:
        UserError: an option that a model section does not have.
    """
    for name in options:
        if name not in part:
            raise fields.unknown_key(
                f"method.draft_options.{name}", (f"method.draft_options.{key}" for key in part)
            )
    return _laid_over(part, options)


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        old = both.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            both[key] = _laid_over(old, value)
        else:
            both[key] = value
    return both


@contextmanager
def in_words_of_the_draft() -> Iterator[None]:
    """Let the checks of a model speak of the draft: `model.path` is `method.draft_options.path` in its error lines."""
    try:
        yield
    except UserError as error:
        line = _NAME.sub("method.draft=", _KEY.sub("method.draft_options.", str(error)))
        kind = Refused if isinstance(error, Refused) else UserError
        raise kind(line) from error
