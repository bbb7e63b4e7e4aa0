"""Jinja templates of others, rendered in a program that ends if one takes more than its share of memory or time."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from signal import SIGKILL
from threading import Lock
from typing import Any, Literal

from jinja2 import Environment, TemplateSyntaxError

from espalier.harness.errors import FOREIGN, UserError, brief, foreign

#: Packages with values that templates may see; other values become their class's name, as in transformers.
SEEN = ("builtins", "collections", "datetime", "decimal", "numpy")

#: Errors of values that cannot be sent to a program.
UNSENT: tuple[type[Exception], ...] = (*FOREIGN, pickle.PicklingError)


class TooMuch(RuntimeError):
    """A template would take more than its share of memory or time."""

    def __init__(self) -> None:
        super().__init__("it takes too much time or memory, or makes too long a text")


class Unrendered(RuntimeError):
    """A template fails.

    Attributes:
        kind: class of its error.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message if kind == "UndefinedError" else f"{kind}: {message}")
        self.kind = kind


def render(kind: Literal["chat", "question"], template: str, values: Mapping[str, Any]) -> str:
    """Return a template rendered with values: for a chat, the arguments of transformers' `render_jinja_template`.

    Cost: a tenth of a millisecond in addition to Jinja's; the program starts once, in a third of a second.

    Raises:
        TooMuch: more memory, time or letters than `template_child` allows.
        Unrendered: the template or an expression is wrong.
    """
    return _renderer(kind, os.getpid()).render(template, values)


@cache
def _renderer(kind: str, process: int) -> _Renderer:
    """Return the program of a process; one that was forked has its own."""
    del process
    return _Renderer(kind)


class _Renderer:
    """A running `template_child`; a new one is started after each that ended."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._idle: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        request = _pickled((template, dict(values)))
        with self._lock:
            line, code = self._exchange(request)
            if (
                code == -SIGKILL
            ):  # by another program, as for the machine's memory; limits end it otherwise
                line, code = self._exchange(request)
        if code is not None:
            raise TooMuch
        reply = json.loads(line)
        if "error" in reply:
            raise Unrendered(reply["error"], reply["message"])
        return str(reply["text"])

    def _exchange(self, request: bytes) -> tuple[bytes, int | None]:
        """Return the reply; or nothing, and the exit code of the program."""
        # Taken until its reply is read, so that an interrupted exchange leaves none to the next.
        child, self._idle = self._running(), None
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.write(request)
            child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            return b"", child.wait()
        self._idle = child
        return line, None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._idle is not None and self._idle.poll() is None:
            return self._idle
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "espalier.harness.specs.template_child", self._kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                # The modules of this process; threads of libraries would take addresses.
                "PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path),
                **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
            },
        )
        assert child.stdout is not None
        if not child.stdout.readline():
            raise RuntimeError(f"{child.args!r} ends with {child.wait()} before it is ready")
        return child


class _Pickler(pickle.Pickler):
    """Writes values of other packages, such as pictures, as their class's name."""

    def reducer_override(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] in SEEN:
            return NotImplemented
        plain: Any
        for plain in (str, dict, list, tuple):
            if isinstance(value, plain):
                return plain, (plain(value),)
        return str, (f"<{type(value).__name__}>",)


def _pickled(request: object) -> bytes:
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(request)
    except UNSENT as error:
        raise Unrendered(type(error).__name__, str(error)) from error
    return stream.getvalue()


def checked_template(key: str, text: str) -> str:
    """Return a text if it is a template, or a plain sentence.

    Raises:
        UserError: a template that does not parse; the line names the config key.
    """
    remedy = "a sentence, or columns as {{ question }}"
    with foreign(f"{key}={brief(text)!r} is no template", remedy, (TemplateSyntaxError,)):
        Environment().parse(text)  # computes nothing
    return text


def question_text(text: str, sample: Mapping[str, Any], where: str) -> str:
    """Return the question of a sample.

    In the template its columns have their names, and `sample` holds all of them, for names that are no words. The
    test `given` checks that a column has content: neither null nor NaN, nor an empty text, nor the text "nan".

    Args:
        text: the template.
        sample: the columns.
        where: data set, split and row, for messages.

    Raises:
        UserError: a column that is not there, something that cannot be computed from these, or a template that takes
            too much time or memory.
    """
    try:
        return render("question", text, {"sample": sample, **sample})
    except TooMuch as error:
        remedy = "a template without endless loops and long repeats"
        raise UserError(f"benchmark.text: {where}: {error}; valid: {remedy}") from error
    except Unrendered as error:
        columns = error.kind == "UndefinedError"
        remedy = ", ".join(sample) if columns else "a template that fits every sample"
        raise UserError(f"benchmark.text: {where}: {error}; valid: {remedy}") from error
