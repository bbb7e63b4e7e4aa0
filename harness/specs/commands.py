"""How every command speaks and ends: standard streams that are there and take any text, one line for an error."""

from __future__ import annotations

import io
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps

from espalier.harness.errors import StoreLost, UserError, first_words, plain

#: Variables that OpenMP and numexpr read; numexpr takes nothing but one number.
THREADS = ("OMP_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS")

Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """Return a command that ends by an exit code and one line on stderr: 2 for bad input, 1 for what cannot be written.

    A reader of its output that leaves early, as `head` does, is no error.
    """

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        speak_plainly()
        try:
            check_environment()
            code = main(argv)
            sys.stdout.flush()
        except UserError as error:
            return complain(error, 2)
        except StoreLost as error:
            return complain(error, 1)
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            # Nothing more can be written, not even at exit.
            discard(sys.stdout)
            return 0
        except OSError as error:
            if error.filename is None:
                discard(sys.stdout)
            return complain(f"{error.filename or 'standard output'}: {first_words(error)}", 1)
        return code

    return run


def complain(problem: object, code: int = 1) -> int:
    """Print an error as one line on stderr, if stderr takes it, and return the exit code."""
    try:
        print(f"error: {' '.join(plain(str(problem)).split())}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
    return code


def check_environment() -> None:
    """Raise UserError for a number of threads that is none: the libraries that read it stop at their import."""
    for name in THREADS:
        value = os.environ.get(name)
        if value and not (value.strip().isdecimal() and int(value) > 0):
            raise UserError(
                f"{name}={value!r} must be a number of threads; valid: 1 and more, or unset"
            )


def short_of_memory(error: Exception) -> str | None:
    """Return the line for an error that a limit of the shell explains (`ulimit -v`); None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"{first_words(error)}; the shell gives this process {limit / 2**30:.1f} GiB of address space (ulimit -v); "
        "valid: ulimit -v unlimited"
    )


def speak_plainly() -> None:
    """Open standard streams that are closed, and escape what their encoding lacks (`±` in ASCII) instead of failing."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It takes the lowest number that is free. A file of ours must not get it: libraries print to it.
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            wrapper = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8")
            setattr(sys, name, wrapper)
        stream = getattr(sys, name)
        # In the C locale Python's own stdout lets through what was no text, and fails on the rest.
        wrapped = isinstance(stream, io.TextIOWrapper)
        if wrapped and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: object) -> None:
    """Let all that a standard stream has and gets go to /dev/null."""
    # A replaced stream, as in tests, has no file of its own.
    with suppress(AttributeError, io.UnsupportedOperation):
        file = stream.fileno()  # type: ignore[attr-defined]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file)
        os.close(null)
