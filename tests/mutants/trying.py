"""Make a mistake in a copy of the tree and run its tests there, in a process forked from one with heavy imports."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from typing import Literal

import pytest

from tests.mutants.lists import ROOT, Mutant

#: Parts of the tree that are not copied.
LEFT_OUT = (".git", ".venv", "results/runs", ".pytest_cache", ".mypy_cache", ".ruff_cache")

#: Modules that take seconds to import: imported once, before the forks. None of them belongs to the tree.
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

#: Seconds after which tests that hang count as failed.
PATIENCE = 900

Verdict = Literal["killed", "survived"]

_FORKS = get_context("forkserver")


def import_once(modules: Sequence[str] = HEAVY) -> None:
    """Make the fork server import `modules` when it starts."""
    _FORKS.set_forkserver_preload(list(modules))


@contextmanager
def copies(count: int, root: Path = ROOT) -> Iterator[Queue[Path]]:
    """Yield `count` copies of a tree for mistakes; they are deleted when the block ends."""
    with tempfile.TemporaryDirectory() as name:
        free: Queue[Path] = Queue()
        for number in range(count):
            tree = Path(name) / str(number)
            shutil.copytree(root, tree, symlinks=True, ignore=partial(_left_out, root))
            free.put(tree)
        yield free


def _left_out(root: Path, folder: str, names: list[str]) -> set[str]:
    """Return which names of a folder are not copied."""
    return {name for name in names if str(Path(folder, name).relative_to(root)) in LEFT_OUT}


def passes(tree: Path, tests: Sequence[str], patience: float | None = PATIENCE) -> bool:
    """Run tests in a tree and return whether all pass; a run that hangs for `patience` seconds fails."""
    run = _FORKS.Process(target=_run, args=(tree, tests))
    run.start()
    run.join(patience)
    if run.exitcode is None:
        assert run.pid is not None
        with suppress(ProcessLookupError):  # not yet the leader of its processes
            os.killpg(run.pid, signal.SIGKILL)
        run.kill()
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
    """Run pytest on a tree; the process imports nothing of it before."""
    os.setsid()  # so that processes of the tests end with them
    for module in [name for name in sys.modules if name.split(".")[0] in ("tests", "espalier")]:
        del sys.modules[module]
    os.environ.update(PYTHONPATH=str(tree), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.chdir(tree)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "", *tests])
    raise SystemExit(int(code))
