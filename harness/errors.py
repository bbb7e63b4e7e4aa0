"""Errors that a user's input can cause: one line, the value, the valid choices, the config key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from typing import Any

#: What opening, parsing and looking into a file can raise that this program has not written itself: it is not there, no
#: file, a link to itself or not to be read; no text, no JSON, nested without end; too large; of another shape.
FOREIGN: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, RecursionError, MemoryError, ArithmeticError),
    *(TypeError, LookupError, AttributeError),
)

#: Longest reason that an error line repeats; a library lists all models that it knows.
LONGEST = 200


class _Line(Exception):
    """An error of one line, in which nothing that others wrote steers a terminal."""

    def __str__(self) -> str:
        """Return the line."""
        return plain(super().__str__())


class UserError(_Line, ValueError):
    """Something the user typed or supplied cannot work; run.py prints the line and exits with 2."""


class Mistakes(UserError):
    """Several mistakes of one table, told together in one line."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Keep what is wrong, one entry each."""
        self.lines = tuple(lines)
        super().__init__("; ".join(self.lines))


class Refused(UserError):
    """What is asked of a method cannot be done on this model or under this budget; other methods may do it."""


class StoreLost(_Line, RuntimeError):
    """The store cannot be written any more, as on a full disk; what it holds stays whole, and run.py exits with 1."""


class JudgeLost(_Line, RuntimeError):
    """The judge does not answer, or refuses every question; answers are kept, and run.py goes on to the next cell."""


def brief(text: str) -> str:
    """Return a text that a line can bear; of a long one the beginning."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


@contextmanager
def foreign(problem: str, remedy: str, more: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn whatever a file of somebody else raises inside the block into one line; nothing but reading belongs there.

    Args:
        problem: the key and the file, and that it cannot be read, as the line begins.
        remedy: what is valid.
        more: errors of a library that reads it.

    Raises:
        UserError: `<problem> (<reason>); valid: <remedy>`; one of the block passes as it is.
    """
    try:
        yield
    except UserError:
        raise
    except (*FOREIGN, *more) as error:
        raise UserError(f"{problem} ({first_words(error)}); valid: {remedy}") from error


def first_words(error: Exception) -> str:
    """Return what an error says, in one line of bearable length, with its type where words alone mean little."""
    told = error.strerror if isinstance(error, OSError) else None
    words = " ".join((told or str(error)).split())
    plain_words = isinstance(error, OSError | ValueError) and words
    line = words if plain_words else f"{type(error).__name__}: {words}".removesuffix(": ")
    return brief(line)


@cache
def tell_once(line: str) -> None:
    """Print a line on stderr, unless this process has printed it before."""
    with suppress(OSError):
        print(plain(line), file=sys.stderr, flush=True)


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> UserError:
    """Return the error for a name that is not in a table: the config key, the name, the nearest and all valid names."""
    names = sorted(valid)
    hint = near_names(name, names, at_most=1)
    return UserError(f"{kind}={name!r} is unknown{hint}; valid: {', '.join(names)}")


def near_names(name: str, valid: Iterable[str], at_most: int = 3) -> str:
    """Return ` (did you mean ...?)` with the valid names nearest to one that is not, or nothing if none is near."""
    near = get_close_matches(name, sorted(valid), n=at_most)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


# Controls of ASCII and of ISO 6429, letters without width, marks that turn the direction, ends of lines and
# paragraphs, halves of letters, tags.
_STEERING = (
    "\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_CONTROLS = re.compile(f"[{_STEERING}]")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def plain(text: str) -> str:
    r"""Return a text in one line with letters that steer as `\x1b` or `\u202e`; ends of lines become blanks."""
    return _CONTROLS.sub(_escape, re.sub(r"[\t\n\r]+", " ", text))


def plain_values(value: Any) -> Any:
    """Return JSON's data with every text in it as `plain` has it."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain_values(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value


def plain_page(page: str) -> str:
    """Return a page of Markdown in which what would be HTML is text, and nothing steers a terminal."""
    lines = (_CONTROLS.sub(_escape, line) for line in page.split("\n"))
    return _TAG.sub("&lt;", "\n".join(lines))


def steers(text: str) -> bool:
    """Say whether a text holds ends of lines or other letters that steer."""
    return _CONTROLS.search(text) is not None


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
