"""The finding of one check of the doctor, and how its errors are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from espalier.harness.errors import UserError

Status = Literal["ok", "failed", "not here"]

#: Checks one thing and returns the result in a few words; raises NotHere, or the fault.
Check = Callable[[], str]

#: How a check fails: its own comparison, our refusals, and what drivers, files and missing packages raise.
FAULTS = (AssertionError, UserError, RuntimeError, OSError, ImportError, ValueError)


class NotHere(Exception):
    """This machine lacks the subject of the check."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, in words, and how long it took in seconds."""

    name: str
    status: Status
    detail: str
    seconds: float


def examine(name: str, check: Check) -> Finding:
    """Run one check and report its result."""
    started = perf_counter()
    status: Status = "ok"
    try:
        detail = check()
    except NotHere as reason:
        status, detail = "not here", str(reason)
    except FAULTS as fault:
        status, detail = "failed", f"{type(fault).__name__}: {' '.join(str(fault).split())}"
    return Finding(name, status, detail, perf_counter() - started)
