"""What all commands share: start and end of the process, streams for any text, exit codes, one line for an error."""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import os
import resource
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from espalier.harness.errors import (
    StoreLost,
    UserError,
    first_words,
    missing_extra,
    plain,
    unknown_name,
)
from espalier.harness.paths import ROOT

#: Variables that OpenMP and numexpr read; numexpr takes nothing but one number.
THREADS = ("OMP_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS")

#: How reports write the command of a run: in the repository, and where the package is installed.
RUN = "python run.py" if (ROOT / "run.py").is_file() else "espalier run"

#: New objects after which Python looks for garbage, and after which a resting collector does.
USUAL, RARE = gc.get_threshold(), (10**6, 10, 10)


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Return a command that ends with an exit code and one line on stderr: 2 for bad input, 1 for failed writes.

    A reader that closes the output early, as `head` does, is not an error.
    """

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        speak_plainly()
        try:
            check_environment()
            code = main(argv)
            sys.stdout.flush()
        except UserError as error:
            return print_error(error, 2)
        except StoreLost as error:
            return print_error(error, 1)
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            # Nothing more can be written, not even at exit.
            discard(sys.stdout)
            return 0
        except OSError as error:
            if error.filename is None:
                discard(sys.stdout)
            return print_error(f"{error.filename or 'standard output'}: {first_words(error)}", 1)
        return code

    return run


def dispatch(
    kind: str,
    modules: Mapping[str, str],
    usage: str,
    argv: Sequence[str] | None,
    meant: Mapping[str, str] | None = None,
) -> int:
    """Call the `main` of the module that the first argument names, with the other arguments; return its exit code.

    Without arguments and for `help` or `--help`, print `usage`; an unknown name is one line and exit code 2. A module
    is imported when it is called.

    Args:
        kind: what a name is called in an error line.
        modules: the module of each name.
        usage: printed as help.
        argv: the arguments; None: those of this process.
        meant: what to write for some names of other programs.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        try:
            print(usage, flush=True)
        except BrokenPipeError:
            discard(sys.stdout)
        return 0
    name, *remaining = arguments
    if name not in modules:
        return print_error(unknown_name(kind, name, modules, meant), 2)
    try:
        code: int = import_module(modules[name]).main(remaining)
    except ModuleNotFoundError as error:
        absent = missing_extra(error)
        if absent is None:
            raise
        return print_error(absent, 2)
    return code


def run_process(main: Callable[[], int]) -> int:
    """Return the exit code of a program; the process ends with it after all hooks.

    Python would free every object of torch and transformers first, which takes two seconds.
    """
    codes: list[int] = []

    def end() -> None:
        if codes:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[0])

    # The hook that is registered first is called last.
    atexit.register(end)
    codes.append(main())
    return codes[0]


@contextmanager
def resting_collector() -> Iterator[None]:
    """Let the garbage collector rest until `collect_again` or the end.

    Imports leave a million objects and hardly any garbage; it would take a sixth of their time.
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def collect_again() -> None:
    """Wake a resting collector; it passes over the objects of now, most of which stay until the command ends."""
    if gc.get_threshold() == RARE:
        gc.freeze()
        gc.set_threshold(*USUAL)


def print_error(problem: object, code: int = 1) -> int:
    """Print an error as one line on stderr, if stderr takes it, and return the exit code."""
    try:
        print(f"error: {' '.join(plain(str(problem)).split())}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
    return code


def check_environment() -> None:
    """Raise UserError for an invalid number of threads, on which libraries would fail at import."""
    for name in THREADS:
        value = os.environ.get(name)
        if value and not (value.strip().isdecimal() and int(value) > 0):
            raise UserError(
                f"{name}={value!r} must be a number of threads; valid: 1 and more, or unset"
            )


def short_of_memory(error: Exception) -> str | None:
    """Return the error line if the shell limits the address space (`ulimit -v`); None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"{first_words(error)}; the shell gives this process {limit / 2**30:.1f} GiB of address space (ulimit -v); "
        "valid: ulimit -v unlimited"
    )


def speak_plainly() -> None:
    """Open closed standard streams, and escape characters that their encoding lacks (`±` in ASCII)."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free descriptor is taken: libraries print to it, so no other file may get it.
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            wrapper = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8")
            setattr(sys, name, wrapper)
        stream = getattr(sys, name)
        # In the C locale Python's stdout passes undecodable bytes and fails on everything else.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def discard(stream: object) -> None:
    """Redirect a standard stream to /dev/null, its buffer included."""
    # A replaced stream, as in tests, has no file.
    with suppress(AttributeError, io.UnsupportedOperation):
        file = stream.fileno()  # type: ignore[attr-defined]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, file)
        os.close(null)


#: Widest line of a help text.
WIDTH = 100


class PlainParser(argparse.ArgumentParser):
    """A parser with errors in which no argument can control a terminal, and paths that are not empty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        """Print the error as one line, and exit with 2."""
        self.exit(print_error(f"{self.prog}: {message}; valid: {self.prog} --help", 2))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            kind = next(iter(action.option_strings), action.dest)
            self.exit(print_error(unknown_name(kind, value, action.choices), 2))


def _path(text: str) -> Path:
    """Return the path of an argument; an empty one, as of a variable that is not set, would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError(
            "'' is no path; valid: a name, or . for the working folder"
        )
    return Path(text)


def command_parser(name: str, about: str | None, *examples: str) -> argparse.ArgumentParser:
    """Return the parser of `espalier <name>`.

    Args:
        name: the command.
        about: its purpose; paragraphs are wrapped to the terminal.
        examples: arguments after the name.
    """
    typed = "\n".join(f"  espalier {name} {example}".rstrip() for example in examples)
    return PlainParser(
        prog=f"espalier {name}",
        description=wrapped(about or ""),
        epilog=f"examples:\n{typed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def wrapped(text: str) -> str:
    """Return a text with its paragraphs wrapped to the terminal."""
    width = min(WIDTH, shutil.get_terminal_size().columns - 2)
    return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.split("\n\n"))
