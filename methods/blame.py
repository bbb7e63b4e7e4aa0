"""Failures inside a method's own code become one line with its name, the file and the line."""

from __future__ import annotations

from traceback import FrameSummary, extract_tb
from types import TracebackType

import torch

from espalier.methods.checks import PlanError, open_conditions
from espalier.methods.views import MethodError, Site

#: Characters of a foreign message that a line repeats at most.
LONGEST = 300


class Blame:
    """A context manager for a method's own code: any exception becomes a PlanError that names the cause.

    MethodErrors keep their text. Out-of-memory errors pass through, because a smaller batch may fit.

    Args:
        method: owner of the code.
        call: the name of the function that is called.
        site: where it runs; None: at no site.
    """

    def __init__(self, method: object, call: str, site: Site | None = None) -> None:
        self._method, self.call = method, call
        self._where = "" if site is None else f" at {site.where} {site.layer}"

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise a PlanError with the method, the place and the reason."""
        name, conditions = f"method {type(self._method).__name__}{self._where}", open_conditions()
        for condition in conditions.unread:
            condition.owner = condition.owner or name
        # Only a person stops a run; code of methods may raise the other exceptions that are no errors.
        if error is None or isinstance(error, KeyboardInterrupt) or _memory(error):
            return
        conditions.settle()  # what was wrong before comes first
        if isinstance(error, PlanError) and not error.owner:
            raise PlanError(str(error), name) from error.__cause__
        if isinstance(error, MethodError):
            return
        line = " ".join(f"{type(error).__name__}: {_reason(error)}".split()).removesuffix(":")
        line = line if len(line) <= LONGEST else f"{line[:LONGEST]}..."
        line = f"`{self.call}` failed{self._place(trace)}: {line}"
        raise PlanError(line, name) from error

    def _place(self, trace: TracebackType | None) -> str:
        """Return the innermost line of the method's own file, else of any."""
        frames: list[FrameSummary] = list(extract_tb(trace))[1:]  # the first is the caller
        code = getattr(getattr(type(self._method), self.call, None), "__code__", None)
        own_frames = [
            frame for frame in frames if code is not None and frame.filename == code.co_filename
        ]
        if not frames:
            return ""
        last = (own_frames or frames)[-1]
        return f" at {last.filename}:{last.lineno}"


def _reason(error: BaseException) -> str:
    """Return the text of an error; none if it cannot be had."""
    try:
        return str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except Exception:  # a method may define what its errors print
        return ""


def _memory(error: BaseException) -> bool:
    lacks = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return lacks or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
