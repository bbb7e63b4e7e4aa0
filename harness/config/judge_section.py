"""The judge of a run: every setting is checked before anything is loaded, and no error line shows a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from espalier.harness.errors import UserError
from espalier.harness.paths import rooted
from espalier.harness.specs import value_checks as fields
from espalier.harness.specs.run_spec import JudgeSpec
from espalier.harness.specs.secrets import names_a_key

KEYS = (
    "base_url model key_env prompt temperature seed max_tokens options timeout retries concurrency"
)

#: Fields of a request that are not for the user to set: what is asked, of whom, and how answers come.
OURS = ("model", "messages", "stream", "n", "api_key", "authorization", "headers")

#: Where the protocol's only call lies below an address; users paste it along.
CALL = "/chat/completions"

#: A name of a machine in letters of any language, or its number.
_HOST = re.compile(r"[\w.:%-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def judge_spec(part: Mapping[str, Any]) -> JudgeSpec:
    """Return the judge that a composed section describes.

    Raises:
        UserError: one line with the key, the value and what is valid.
    """
    prompt = fields.optional_text("judge.prompt", part["prompt"])
    return JudgeSpec(
        base_url=_address(fields.optional_text("judge.base_url", part["base_url"])),
        model=fields.optional_text("judge.model", part["model"]),
        key_env=_variable(part["key_env"]),
        prompt=None if prompt is None else rooted(prompt),
        temperature=_temperature(part["temperature"]),
        seed=fields.optional_integer("judge.seed", part["seed"], at_least=0),
        max_tokens=fields.optional_integer("judge.max_tokens", part["max_tokens"], at_least=1),
        options=_options(fields.table("judge.options", part["options"])),
        timeout=fields.positive("judge.timeout", part["timeout"]),
        retries=fields.integer("judge.retries", part["retries"], at_least=0),
        concurrency=fields.integer("judge.concurrency", part["concurrency"], at_least=1),
    )


def _address(value: str | None) -> str | None:
    if value is None:
        return None
    try:
        parts = urlsplit(value)
        whole = parts.scheme in ("http", "https") and parts.port != 0
        whole = whole and _HOST.fullmatch(parts.hostname or "") is not None
        whole = whole and not any(sign.isspace() for sign in value)
    except ValueError:  # a port that is no number
        parts, whole = urlsplit(""), False
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # What is wrong may be a key, so the value stays out of the line.
        raise UserError(
            "judge.base_url holds more than an address; valid: http(s)://host:port/v1, and the key in the "
            "environment (judge.key_env)"
        )
    if not whole or parts.path.rstrip("/").endswith(CALL):
        raise UserError(
            f"judge.base_url={value!r} must be the address of a server up to /v1, "
            f"for example http://localhost:8000/v1, without {CALL}"
        )
    return value.rstrip("/")


def _variable(value: Any) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        # It may be the key itself.
        raise UserError(
            "judge.key_env must be the name of an environment variable, as OPENAI_API_KEY, and not a key"
        )
    return value


def _temperature(value: Any) -> float | None:
    if value is None:
        return None
    if value == 0 and not isinstance(value, bool):
        return 0.0
    return fields.positive("judge.temperature", value)


def _options(table: dict[str, Any]) -> dict[str, Any]:
    for name in _names(table):
        if name.lower() in OURS or names_a_key(name):
            raise UserError(
                f"judge.options.{name} is not for options; valid: other fields of a chat completion, and the key in "
                "the environment (judge.key_env)"
            )
    return table


def _names(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a table and of those in it."""
    for name, value in table.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from _names(value)
