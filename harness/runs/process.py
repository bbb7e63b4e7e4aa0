"""How the process of a command starts and ends: nobody looks for garbage among modules, or frees them at the end."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: New objects after which Python looks for garbage, and after which a resting collector does.
USUAL, RARE = gc.get_threshold(), (10**6, 10, 10)


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
