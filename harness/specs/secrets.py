"""Keep keys of services out of prints and files, also if a server repeats them."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MASK = "***"

#: Names of settings that hold a key, and what keys of services look like.
_NAMED = re.compile(
    r"(?i)(.*[_-])?(api_?key|apikey|key|token|secret|password|passwd|auth|authorization|bearer|credentials?)"
)
# What follows is looked at, not taken: in `export:API_KEY=...` a value is the name of the next one.
_SETTING = re.compile(r"([\w.+~-]+)[\"']?\s*[:=]\s*[\"']?(?=([^,{}\[\]\"'=]+))")
_OPTION = re.compile(r"--([\w.-]+)[\"']?[\s,]+[\"']?([^,{}\[\]\"'=\s]+)")

#: Values after the path of an address, by whatever name, and the password before the host.
_QUERY = re.compile(r"[?&;#](?:[\w.~-]+=)?([^?&;#\s\"'\]},]+)")
_PASSWORD = re.compile(r":/*([^:@\"']+)@")
_LOOKS = re.compile(r"\b(?:sk|pk|hf|gsk|xai)[-_][\w-]{8,}")

#: The part before the host of an address.
_USER = re.compile(r"(?<=://)[^/\s@'\"]+@")


def masked(text: str, keys: Iterable[str | None]) -> str:
    """Return a text without keys, and without the part before the host of an address."""
    for key in filter(None, keys):
        text = text.replace(key, MASK)
    return _USER.sub(f"{MASK}@", text)


def names_a_key(name: str) -> bool:
    """Return whether a setting of this name, or of its last part, holds a key, a password or the like."""
    return _NAMED.fullmatch(name.rpartition(".")[2].lstrip("+~-")) is not None


def typed(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the keys on a command line: values of settings that are named so, and words that look like keys."""
    matches: list[str] = []
    for argument in arguments:
        matches += _LOOKS.findall(argument)
        if "//" in argument or ":/" in argument:
            matches += _QUERY.findall(argument)
        for password in _PASSWORD.findall(argument):
            matches += [password, *password.split()]
        for name, value in (*_SETTING.findall(argument), *_OPTION.findall(argument)):
            if names_a_key(name) and not value.strip().replace(".", "").isdigit():
                matches += [value.strip(), *value.split()]
    return tuple(dict.fromkeys(word for word in matches if len(word) > 3))


def without_keys(address: str) -> str:
    """Return an address without password, and without the values after its path."""
    return masked(address, typed([address]))


def wandb_keys() -> tuple[str, ...]:
    """Return the keys that wandb may use here: of the environment, and of the netrc file."""
    keys = [os.environ.get("WANDB_API_KEY", "").strip()]
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
        keys += [password for _, _, password in netrc.netrc(path).hosts.values() if password]
    return tuple(filter(None, dict.fromkeys(keys)))
