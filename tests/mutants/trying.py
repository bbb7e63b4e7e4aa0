"""Making a mistake in a copy of the tree and running its tests there, in a process forked off one that is warm."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from typing import Literal

import pytest

from tests.mutants.lists import ROOT, Mutant

#: What of the tree is not copied.
LEFT_OUT = (".git", ".venv", "results", ".pytest_cache", ".mypy_cache", ".ruff_cache")

#: What a run of tests spends seconds on importing: done once, before the forks. None of it is the tree's own.
HEAVY = [
    "pytest",
    "torch",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "lmms_eval.api.instance",
    "hydra",
    "pandas",
    "scipy.stats",
    "matplotlib.pyplot",
]

#: Seconds after which tests that hang count as having noticed.
PATIENCE = 900

Verdict = Literal["killed", "survived"]

_FORKS = get_context("forkserver")


def import_once(modules: Sequence[str] = HEAVY) -> None:
    """Have the process that the others are forked off import `modules` when it starts."""
    _FORKS.set_forkserver_preload(list(modules))


@contextmanager
def copies(count: int, root: Path = ROOT) -> Iterator[Queue[Path]]:
    """Yield so many copies of a tree to make mistakes in; they go when the block ends."""
    with tempfile.TemporaryDirectory() as name:
        free: Queue[Path] = Queue()
        for number in range(count):
            tree = Path(name) / str(number)
            shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
            free.put(tree)
        yield free


def passes(tree: Path, tests: Sequence[str], patience: float | None = PATIENCE) -> bool:
    """Run tests in a tree and say whether all pass; a run that hangs for `patience` seconds does not."""
    run = _FORKS.Process(target=_run, args=(tree, tests))
    run.start()
    run.join(patience)
    if run.exitcode is None:
        assert run.pid is not None
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
    return run.exitcode == 0


def verdict(mutant: Mutant, free: Queue[Path]) -> Verdict:
    """Make one mistake in a free copy, run its tests there, and put the copy right again."""
    tree = free.get()
    path = tree / mutant.file
    text, times = path.read_text(), path.stat()
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        return "survived" if passes(tree, mutant.tests) else "killed"
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        free.put(tree)


def _run(tree: Path, tests: Sequence[str]) -> None:
    """Run pytest on a tree, as the first thing that this process does with it."""
    os.setsid()  # so that what the tests start ends with them
    for module in [one for one in sys.modules if one.split(".")[0] in ("tests", "espalier")]:
        del sys.modules[module]
    os.environ.update(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(one for one in sys.path if one not in ("", str(ROOT)))]
    os.chdir(tree)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *tests])
    raise SystemExit(int(code))
