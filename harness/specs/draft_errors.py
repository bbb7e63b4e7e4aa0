"""Error lines about a model, reworded for the draft model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from espalier.harness.errors import Refused, UserError
from espalier.harness.specs.run_spec import MODEL_KEYS

#: A key of the model section in an error line; neither `model.safetensors` nor a directory of that name.
_KEY = re.compile(rf"(?<![\w./-])model\.(?=(?:{'|'.join(MODEL_KEYS)})\b)")

_NAME = re.compile(r"(?<![\w./-])model=")


@contextmanager
def in_words_of_the_draft() -> Iterator[None]:
    """Reword the errors of a model's checks for the draft: `model.path` becomes `method.draft_options.path`."""
    try:
        yield
    except UserError as error:
        line = _NAME.sub("method.draft=", _KEY.sub("method.draft_options.", str(error)))
        kind = Refused if isinstance(error, Refused) else UserError
        raise kind(line) from error
