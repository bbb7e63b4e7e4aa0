"""A room without doors: what runs in it may read and compute, but not write, ask a server, start a process or wait."""

from __future__ import annotations

import builtins
import io
import os
import socket
import subprocess
import sys
import tempfile
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

    What is printed is thrown away. Raises Effect where a file outside the folder is to be written, a connection opened,
    a process started or time waited for. For this thread's use: the patches hold for the whole process meanwhile.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        silence = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(redirect_stdout(silence))
        stack.enter_context(redirect_stderr(silence))
        reader = _reading(open, folder)
        for module, name, stand_in in (
            (builtins, "open", reader),
            (io, "open", reader),
            (os, "open", _reading_low(os.open, folder)),
            (os, "mkdir", _inside(os.mkdir, folder)),
            (tempfile, "tempdir", str(folder)),
            (socket.socket, "connect", _refuse("opens a connection")),
            (socket, "create_connection", _refuse("opens a connection")),
            (subprocess.Popen, "__init__", _refuse("starts a process")),
            (os, "system", _refuse("starts a process")),
            (time, "sleep", _refuse("waits")),
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


def _reading(real: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            _check(file, folder)
        return real(file, mode, *args, **more)

    return opened


def _reading_low(real: Callable[..., int], folder: Path) -> Callable[..., int]:
    def opened(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & WRITES:
            _check(path, folder)
        return real(path, flags, *args, **more)

    return opened


def _inside(real: Callable[..., None], folder: Path) -> Callable[..., None]:
    def done(path: Any, *args: Any, **more: Any) -> None:
        _check(path, folder)
        real(path, *args, **more)

    return done


def _check(file: Any, folder: Path) -> None:
    # A number is a file that somebody has opened already.
    if not isinstance(file, int) and folder not in Path(os.fsdecode(file)).resolve().parents:
        raise Effect("writes a file")


def _refuse(what: str) -> Callable[..., Any]:
    def refused(*args: Any, **more: Any) -> Any:
        del args, more
        raise Effect(what)

    return refused
