"""A sandbox: code in it can read and compute, but not write files, open connections, start processes or sleep.

It rests on Python's audit events, which no import order or alias escapes; only sleeping raises none and is patched.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from espalier.harness.evaluation.upstream import sleep_checked

#: Flags of `open` for more than reading.
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

#: Audit events that are refused, and the reason in the error line.
REFUSED = {
    "socket.connect": "opens a connection",
    "socket.getaddrinfo": "opens a connection",
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
}


class Effect(BaseException):
    """A refused action. It is not an Exception: tasks catch those, sleep and try again."""


#: Threads in a sandbox, each with the folder that it may write to.
_folders: dict[int, Path] = {}

#: Whether the audit hook is there; Python cannot remove one.
_watching = False


@contextmanager
def without_effects() -> Iterator[Path]:
    """Refuse effects, and yield a folder in which files may be written; it is removed at the end of the block.

    Printed text is dropped. Only this thread is restricted.

    Raises:
        Effect: this thread would write a file outside the folder, open a connection, start a process or sleep.
    """
    _watch()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(redirect_stdout(silence))
        stack.enter_context(redirect_stderr(silence))
        stack.enter_context(sleep_checked(_check_sleep))
        stack.enter_context(_restricted(folder))
        yield folder


@contextmanager
def _restricted(folder: Path) -> Iterator[None]:
    """Restrict this thread; temporary files go to the folder, and imports leave no bytecode."""
    thread = threading.get_ident()
    settings = tempfile.tempdir, sys.dont_write_bytecode
    tempfile.tempdir, sys.dont_write_bytecode = str(folder), True
    _folders[thread] = folder
    try:
        yield
    finally:
        del _folders[thread]
        tempfile.tempdir, sys.dont_write_bytecode = settings


def _watch() -> None:
    global _watching
    if not _watching:
        sys.addaudithook(_check)
        _watching = True


def _check(event: str, args: tuple[Any, ...]) -> None:
    """Raise Effect for an audit event that a sandbox refuses. Cost: a microsecond an event, also outside sandboxes."""
    folder = _folders.get(threading.get_ident())
    if folder is None:
        return
    if event in REFUSED:
        raise Effect(REFUSED[event])
    if event == "os.mkdir":
        _check_inside(args[0], folder)
    elif event == "open":
        path, _, flags = args
        # A number is an open file; `tempfile` opens the folder itself, with its own opener.
        if isinstance(path, str | bytes | os.PathLike) and flags & WRITES:
            _check_inside(path, folder)


def _check_inside(path: Any, folder: Path) -> None:
    resolved = Path(os.fsdecode(path)).resolve()
    if resolved != folder and folder not in resolved.parents:
        raise Effect("writes a file")


def _check_sleep() -> None:
    if threading.get_ident() in _folders:
        raise Effect("waits")
