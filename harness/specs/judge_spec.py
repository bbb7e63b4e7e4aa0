"""The judge of a run: its settings, checked before anything is loaded; no error line contains a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from espalier.harness.errors import UserError
from espalier.harness.settings import (
    OMITTED,
    OPEN,
    STATED,
    By,
    Count,
    FromZero,
    Natural,
    Positive,
    Text,
    read_value,
    table,
)
from espalier.harness.specs.secrets import names_a_key

#: Fields of a request that the harness sets: the model, the messages, and the form of the reply.
RESERVED = ("model", "messages", "stream", "n", "api_key", "authorization", "headers")

#: The protocol's only call, relative to the server's address; users paste it along.
CALL = "/chat/completions"

#: A host name in letters of any language, or its number.
_HOST = re.compile(r"[\w.:%-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _read_address(key: str, value: Any) -> str:
    text: str = read_value(key, value, Text)
    try:
        parts = urlsplit(text)
    except ValueError:  # brackets that do not close
        parts = urlsplit("")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # The extra part may be a key, so the line does not show the value.
        raise UserError(
            f"{key} holds more than an address; valid: http(s)://host:port/v1, and the key in the environment "
            "(judge.key_env)"
        )
    if not _is_server(parts) or any(sign.isspace() for sign in text):
        raise UserError(
            f"{key}={value!r} must be the address of a server up to /v1, for example http://localhost:8000/v1, "
            f"without {CALL}"
        )
    return text.rstrip("/")


def _is_server(parts: SplitResult) -> bool:
    try:
        reachable = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:  # the port is not a number
        return False
    has_host = _HOST.fullmatch(parts.hostname or "") is not None
    return reachable and has_host and not parts.path.rstrip("/").endswith(CALL)


def _read_variable(key: str, value: Any) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        # The value may be the key itself.
        raise UserError(
            f"{key} must be the name of an environment variable, as OPENAI_API_KEY, and not a key"
        )
    return value


def _read_options(key: str, value: Any) -> dict[str, Any]:
    options = table(key, value)
    for name in _nested_names(options):
        if name.lower() in RESERVED or names_a_key(name):
            raise UserError(
                f"{key}.{name} is not for options; valid: other fields of a chat completion, and the key in the "
                "environment (judge.key_env)"
            )
    return options


def _nested_names(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a table and of the tables in it."""
    for name, value in options.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from _nested_names(value)


@dataclass(frozen=True)
class JudgeSpec:
    """The language model that judges answers, on a server with OpenAI's protocol of chat completions.

    Attributes:
        base_url: address up to `/v1`; None: there is no judge.
        model: its name on that server.
        key_env: the environment variable that holds the key; a server without keys needs none.
        prompt: a file with a prompt that replaces the benchmark's own (docs/judges.md).
        temperature: of its answers, as `seed` and `max_tokens`; None leaves a field out of the request.
        options: further fields of the request; they override those above.
        timeout: seconds that a request may take, from its first byte to its last.
        retries: how often a request is repeated that failed, or got a reply without a verdict.
        concurrency: requests that run at once.
    """

    base_url: Annotated[str, By(_read_address)] | None = field(default=None, metadata=OMITTED)
    model: Text | None = field(default=None, metadata={**OPEN, **STATED})
    key_env: Annotated[str, By(_read_variable)] = field(default="OPENAI_API_KEY", metadata=OMITTED)
    prompt: Path | None = field(default=None, metadata=OMITTED)
    temperature: FromZero | None = field(default=0.0, metadata=STATED)
    seed: Natural | None = field(default=0, metadata=STATED)
    max_tokens: Count | None = field(default=1024, metadata=STATED)
    options: Annotated[Mapping[str, Any], By(_read_options)] = field(
        default_factory=dict, metadata=STATED
    )
    timeout: Positive = field(default=120.0, metadata=OMITTED)
    retries: Natural = field(default=4, metadata=OMITTED)
    concurrency: Count = field(default=8, metadata=OMITTED)
