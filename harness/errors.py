"""Errors that a user's input can cause: one line, the value, the valid choices, the config key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache

#: The value of a key that is named like a secret.
_SECRET = re.compile(
    r"(?i)(?:api[_-]?key|authorization|(?<![a-z_])token|secret|passw\w*)[\"']?\s*[:=]\s*[\"']?([^\s,}\"']{3,})"
)


class UserError(ValueError):
    """Something the user typed or supplied cannot work; run.py prints the line and exits with 2."""


class Mistakes(UserError):
    """Several mistakes of one table, told together in one line."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Keep what is wrong, one entry each."""
        self.lines = tuple(lines)
        super().__init__("; ".join(self.lines))


class Refused(UserError):
    """What is asked of a method cannot be done on this model or under this budget; other methods may do it."""


class StoreLost(RuntimeError):
    """The store cannot be written any more, as on a full disk; what it holds stays whole, and run.py exits with 1."""


class JudgeLost(RuntimeError):
    """The judge does not answer, or refuses every question; answers are kept, and run.py goes on to the next cell."""


def without_secrets(line: str, arguments: Iterable[str]) -> str:
    """Return an error line without the values that arguments give to keys named like a secret, as `api_key`."""
    for argument in arguments:
        for value in _SECRET.findall(argument):
            line = line.replace(value, "***")
    return line


@cache
def tell_once(line: str) -> None:
    """Print a line on stderr, unless this process has printed it before."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """Return the error for a name that is not in a table: the config key, the name, the nearest and all valid names."""
    names = sorted(valid)
    hint = near_names(name, names, at_most=1)
    return UserError(f"{kind}={name!r} is unknown{hint}; valid: {', '.join(names)}")


def near_names(name: str, valid: Iterable[str], at_most: int = 3) -> str:
    """Return ` (did you mean ...?)` with the valid names nearest to one that is not, or nothing if none is near."""
    near = get_close_matches(name, sorted(valid), n=at_most)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
