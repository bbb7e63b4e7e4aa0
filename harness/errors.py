"""Errors caused by a user's input: one line with the config key, the value and the valid choices."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from typing import Any, TextIO

from yaml import YAMLError

#: Errors of opening, parsing and inspecting what another program or a user wrote: it is missing, not a file, a link to
#: itself or unreadable; not text, not JSON, YAML or Python, nested without end; too large; of another shape.
FOREIGN: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, RecursionError, MemoryError, ArithmeticError),
    *(TypeError, LookupError, AttributeError, SyntaxError, YAMLError),
)

#: Longest reason in an error line; a library lists all models that it knows.
MAX_REASON = 200


class _OneLineError(Exception):
    """An error of one line, in which foreign text cannot control a terminal."""

    def __str__(self) -> str:
        """Return the line."""
        return plain(super().__str__())


class UserError(_OneLineError, ValueError):
    """Something the user typed or supplied cannot work; run.py prints the line and exits with 2."""


class UserErrors(UserError):
    """Several mistakes of one table, in one line."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Store the mistakes, one entry each."""
        self.lines = tuple(lines)
        super().__init__("; ".join(self.lines))


class NotCached(UserError):
    """A repository of the hub is not in the local cache, and may not be downloaded."""


class Refused(UserError):
    """The method cannot run on this model or under this budget; other methods may."""


class StoreLost(_OneLineError, RuntimeError):
    """The store cannot be written any more, as on a full disk; its content is kept, and run.py exits with 1."""


class EngineEnded(_OneLineError, RuntimeError):
    """The program that answers in the harness's place has ended; finished samples are kept, and run.py continues."""


class JudgeLost(_OneLineError, RuntimeError):
    """The judge does not answer, or refuses every question; answers are kept, and run.py continues."""


def missing_extra(error: BaseException) -> UserError | None:
    """Return the error if a module of this package imports one that only an extra of it installs, else None."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if not isinstance(error, ModuleNotFoundError) or innermost is None:
        return None
    importer = str(innermost.tb_frame.f_globals.get("__name__"))
    package = str(error.name).partition(".")[0]
    if package == "espalier" or not importer.startswith("espalier."):
        return None  # of a user's module, or of a library
    extras = {"wandb": "wandb", "submitit": "slurm", "gradio": "explore"}
    extra = {**extras, "distributed": "dask", "ray": "ray"}.get(package, "run")
    return UserError(
        f"the package {package} is not installed; valid: pip install 'espalier-vlm[{extra}]'"
    )


def brief(text: str) -> str:
    """Return a text cut to the length of a line."""
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


@contextmanager
def foreign(
    problem: str, remedy: str, library_errors: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn any error of reading another program's file inside the block into one line; only reading belongs there.

    Args:
        problem: start of the line: the key and the file, and that it cannot be read.
        remedy: the valid values.
        library_errors: errors of a library that reads it.

    Raises:
        UserError: `<problem> (<reason>); valid: <remedy>`; a UserError of the block passes unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except (*FOREIGN, *library_errors) as error:
        raise UserError(f"{problem} ({first_words(error)}); valid: {remedy}") from error


def first_words(error: Exception) -> str:
    """Return the text of an error in one line of limited length, with its type if the text alone is unclear."""
    reason = error.strerror if isinstance(error, OSError) else None
    words = " ".join(str(reason or text_of(error)).split())
    plain_words = isinstance(error, OSError | ValueError) and words
    line = words if plain_words else f"{type(error).__name__}: {words}".removesuffix(": ")
    return brief(line)


def text_of(error: BaseException) -> str:
    """Return the text of an error; none if its class, which may be a user's, fails to give one."""
    try:
        return str(error)
    except Exception:
        return ""


@cache
def tell_once(line: str) -> None:
    """Print a line on stderr, unless this process has printed it before."""
    with suppress(OSError):
        print(plain(line), file=sys.stderr, flush=True)


def print_lines(*lines: object, file: TextIO | None = None) -> None:
    """Print each value as one `plain` line, on standard output by default."""
    for line in lines:
        print(plain(str(line)), file=file, flush=True)


def unknown_name(
    kind: str, name: str, valid: Iterable[str], meant: Mapping[str, str] | None = None
) -> UserError:
    """Return the error for a name that is not in a table: the config key, the name, the nearest and all valid names.

    Args:
        kind: the config key.
        name: as it was set.
        valid: the names of the table.
        meant: the nearest for names that are unlike all of them.
    """
    names = sorted(valid)
    if name in names:  # as another type: null, true
        names[names.index(name)] = f"{name} without quotes"
        return UserError(f"{kind}={name!r} is a text; valid: {', '.join(names)}")
    near = (meant or {}).get(name)
    hint = f" (did you mean {near}?)" if near else near_names(name, names, at_most=1)
    return UserError(f"{kind}={name!r} is unknown{hint}; valid: {', '.join(names)}")


def near_key(key: str, valid: Iterable[str]) -> str | None:
    """Return the valid key that a wrong one is most like; None if none is near."""
    near = get_close_matches(key, names := sorted(valid), n=1)
    if not near and "token" in key:
        near = [name for name in names if name == "keep"]
    return near[0] if near else None


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
    r"""Return a text in one line with control characters as `\x1b` or `\u202e`; ends of lines become blanks."""
    return _CONTROLS.sub(_escape, re.sub(r"[\t\n\r]+", " ", text))


def plain_values(value: Any) -> Any:
    """Return JSON data with `plain` applied to every text."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain_values(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value


def plain_page(page: str) -> str:
    """Return a page of Markdown in which HTML is escaped and no control characters are left."""
    lines = (_CONTROLS.sub(_escape, line) for line in page.split("\n"))
    return _TAG.sub("&lt;", "\n".join(lines))


def steers(text: str) -> bool:
    """Return whether a text holds ends of lines or control characters."""
    return _CONTROLS.search(text) is not None


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
