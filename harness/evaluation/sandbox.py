"""A room without doors: what runs in it may read and compute, but not write, ask a server, start a process or wait."""

from __future__ import annotations

import builtins
import io
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

#: Flags of `os.open` that do more than read.
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Effect(BaseException):
    """Something was to be done that outlives the computation. No Exception: tasks catch those, wait and try again."""


@contextmanager
def without_effects() -> Iterator[Path]:
    """Refuse effects, and yield a folder in which files may be written; it goes when the block ends.

    What is printed is thrown away. Raises Effect where this thread would write a file outside the folder, open a
    connection, start a process or wait; other threads may.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(redirect_stdout(silence))
        stack.enter_context(redirect_stderr(silence))
        reading = _checked(
            open,
            lambda file, mode="r", *_, **more: _opens(file, mode, folder, bool(more.get("opener"))),
        )
        for module, name, stand_in in (
            (builtins, "open", reading),
            (io, "open", reading),
            (
                os,
                "open",
                _checked(os.open, lambda file, flags, *_, **__: _opens(file, flags, folder)),
            ),
            (os, "mkdir", _checked(os.mkdir, lambda path, *_, **__: _inside(path, folder))),
            (socket.socket, "connect", _refused(socket.socket.connect, "opens a connection")),
            (socket, "create_connection", _refused(socket.create_connection, "opens a connection")),
            (subprocess.Popen, "__init__", _refused(subprocess.Popen.__init__, "starts a process")),
            (os, "system", _refused(os.system, "starts a process")),
            (time, "sleep", _refused(time.sleep, "waits")),
            (tempfile, "tempdir", str(folder)),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield folder


@contextmanager
def tokens_remembered() -> Iterator[None]:
    """Let pycocoevalcap's tokenizer, a Java process, be asked for each caption once within the block.

    Aggregations of captions tokenise all captions whenever they are called, and tokens depend on their caption alone.
    Nothing is patched where no task has imported it.
    """
    module = sys.modules.get("pycocoevalcap.tokenizer.ptbtokenizer")
    if module is None:
        yield
        return
    ask, known = module.PTBTokenizer.tokenize, dict[str, str]()

    def tokenize(self: Any, captions: dict[Any, list[dict[str, Any]]]) -> dict[Any, list[str]]:
        texts = dict.fromkeys(one["caption"] for several in captions.values() for one in several)
        new = [text for text in texts if text not in known]
        if new:
            told = ask(self, {number: [{"caption": text}] for number, text in enumerate(new)})
            known.update({text: told[number][0] for number, text in enumerate(new)})
        return {
            name: [known[one["caption"]] for one in several] for name, several in captions.items()
        }

    with mock.patch.object(module.PTBTokenizer, "tokenize", tokenize):
        yield


def _checked(real: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that is checked before it is called, in this thread alone."""
    owner = threading.get_ident()

    def stand_in(*args: Any, **more: Any) -> Any:
        if threading.get_ident() == owner:
            check(*args, **more)
        return real(*args, **more)

    return stand_in


def _refused(real: Callable[..., Any], what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **more: Any) -> None:
        del args, more
        raise Effect(what)

    return _checked(real, refuse)


def _opens(file: Any, how: str | int, folder: Path, opened: bool = False) -> None:
    writes = how & WRITES if isinstance(how, int) else set(how) & set("wax+")
    # A number is a file that somebody has opened already, as is what an opener returns, which comes here itself.
    if writes and not opened and not isinstance(file, int):
        _inside(file, folder)


def _inside(path: Any, folder: Path) -> None:
    if folder not in Path(os.fsdecode(path)).resolve().parents:
        raise Effect("writes a file")
