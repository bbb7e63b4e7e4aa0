"""Keep keys of services out of prints and files, also if a server repeats them in another encoding."""

from __future__ import annotations

import base64
import html.entities
import netrc
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from espalier.harness.errors import FOREIGN

MASK = "***"

#: A part of a key of this many letters is masked, too: servers shorten keys that they repeat.
PIECE = 8

#: Letters of base64 that no other word is likely to have.
SHORTEST = 5

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
    """Return a text without keys, and without the part before the host of an address.

    A key is found as it is; with letters escaped as in JSON, once or more, in URLs or HTML; as base64, of whatever
    stands before it; in hexadecimal; and where its beginning or end of `PIECE` letters or more is left.
    """
    for key in keys:
        if key:
            text = _pattern(key).sub(MASK, text)
            for size in range(len(key) - 1, PIECE - 1, -1):
                for piece in (key[:size], key[-size:]):
                    text = text.replace(piece, MASK)
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


def scrub(files: Iterable[Path], keys: Iterable[str | None]) -> None:
    """Take keys out of text files in place; what cannot be read or written stays."""
    keys = tuple(keys)
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="surrogateescape")
            clean = masked(text, keys)
            if clean != text:
                file.write_text(clean, encoding="utf-8", errors="surrogateescape")
        except FOREIGN:
            continue


@cache
def _pattern(key: str) -> re.Pattern[str]:
    coded = sorted(_base64(key), key=len, reverse=True)
    forms = ["".join(map(_letter, key)), f"(?i:{key.encode().hex()})", *map(re.escape, coded)]
    return re.compile("|".join(forms))


def _letter(letter: str) -> str:
    """Return a pattern of a letter and of its escapes."""
    code = ord(letter)
    names = [name.rstrip(";") for name, text in html.entities.html5.items() if text == letter]
    hexadecimal = f"0*(?i:{code:x})"
    entities = "|".join((rf"\#0*{code}", rf"\#[xX]{hexadecimal}", *map(re.escape, names)))
    return (
        rf"(?:\\*{re.escape(letter)}|\\+[uU]\{{?{hexadecimal}\}}?|\\+x{hexadecimal}|%(?:25)*(?i:{code:02x})"
        rf"|&(?:amp;)*(?:{entities});?)"
    )


def _base64(key: str) -> set[str]:
    """Return the part of a key's base64 text that stays the same with up to two letters before it and any after it."""
    matches = set()
    for before in range(3):
        coded = base64.b64encode(b"\0" * before + key.encode()).decode().rstrip("=")
        # The first letters depend on the text before, the last ones on the text after.
        start = (0, 2, 3)[before]
        whole_signs = (before + len(key)) * 8 // 6
        middle = coded[start:whole_signs]
        if len(middle) >= SHORTEST:
            matches |= {middle, middle.replace("+", "-").replace("/", "_")}
    return matches
