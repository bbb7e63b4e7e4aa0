"""Processes that run one sweep over one store: the real runner, journals, leases and model, forked to start at once.

Every second writer pretends to be on another machine: its kernel has another name, and its locks lie in a folder that
the others do not see, as a lock of a system does that does not reach over the network.
"""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

import espalier.harness.evaluation
from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.ranks import Ranks
from espalier.harness.runs.runner import AdmittedCell, Runner
from espalier.harness.store import claims
from espalier.harness.store.files import durable
from espalier.harness.store.files.journal import Journal

#: Short enough that another machine takes over within the test.
TERMS = ("lease.beat=0.1", "lease.expiry=1.5")
METHODS = ("random", "uniform", "divprune", "fastv")
RATIOS = (0.3, 0.5, 0.7, 0.8, 0.9)


class Command:
    """One sweep, composed, checked and with its model loaded before the first writer is forked.

    Args:
        cells: at most 20.
        limit: samples of each.
        store: where it is checked; writers are given a store each time.
    """

    def __init__(self, cells: int, limit: int, store: Path) -> None:
        torch.set_num_threads(1)
        # Seconds, once for all writers; a run imports them when it needs them.
        for module in ("lmms_eval.evaluator", *_of(espalier.harness.evaluation)):
            importlib.import_module(module)
        line = (f"method={','.join(METHODS)}", f"ratio={','.join(map(str, RATIOS))}")
        arguments = ("-m", "model=seedling", "model.device=cpu", *line, f"limit={limit}", *TERMS)
        command = read_command([*arguments, "engine.batch_size=2", "json=false", f"store={store}"])
        specs = [build_spec(cfg) for cfg in command.cells[:cells]]
        self.argv = command.argv
        self.runner = Runner(True, Ranks(), command.argv, lines=command.lines[:cells])
        self.runner.admit(specs)
        self.runner.pool.adapter(specs[0].model)

    @property
    def keys(self) -> list[str]:
        """Run keys of the cells, in the order of the command."""
        return [cell.job.key for cell in self.runner.admitted]

    def announce(self, store: Path) -> None:
        """Leave the list of cells in a store, as run.py does before the first cell."""
        self._at(store).announce()

    def begin(self, store: Path, machine: int, folder: Path, seed: int) -> int:
        """Fork a writer that runs all cells in its own order; return its process id.

        Args:
            store: where it writes.
            machine: the one it pretends to run on.
            folder: where locks, a log and the list of acknowledged answers go.
            seed: of the order.
        """
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            with (folder / "log").open("a") as log:
                os.dup2(log.fileno(), sys.stderr.fileno())
            pretend(machine, folder)
            acknowledge(folder / "acknowledged")
            runner = self._at(store)
            for cell in random.Random(seed).sample(runner.admitted, len(runner.admitted)):
                runner.run(cell)
            code = 0
        except Exception:
            # Where the parent finds it; above this nothing of the child's may run.
            traceback.print_exc()
        finally:
            # Nothing of the parent's may run at the end of a child.
            os._exit(code)

    def _at(self, store: Path) -> Runner:
        def moved(cell: AdmittedCell) -> AdmittedCell:
            job = replace(cell.job, spec=replace(cell.job.spec, store=store))
            return AdmittedCell(replace(cell.spec, store=store), job, cell.line)

        cells = [*map(moved, self.runner.admitted)]
        pool, out = self.runner.pool, io.StringIO()
        return Runner(True, Ranks(), self.argv, out=out, pool=pool, admitted=cells)


def _of(package: ModuleType) -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return [f"{package.__name__}.{name}" for name in names]


def pretend(machine: int, folder: Path) -> None:
    """Be a process of another machine from now on."""
    name = f"{machine:08x}"
    locks = folder / f"locks-{name}"
    locks.mkdir(exist_ok=True)
    durable.kernel = lambda: name

    def local(path: Path, **more: float) -> FileLock:
        return FileLock(locks / f"{Path(path).parent.name}.lock", **more)

    claims.FileLock = local  # type: ignore[assignment, misc]


def acknowledge(path: Path) -> None:
    """Record each answer after its append has returned: from then on it may not be lost."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    plain: Callable[..., None] = Journal.append

    def append(journal: Journal, *entries: dict[str, object]) -> None:
        plain(journal, *entries)
        run = journal.path.parent.name
        lines = [f"{run} {entry['doc_id']}\n" for entry in entries if "answer" in entry]
        os.write(file, "".join(lines).encode())

    Journal.append = append  # type: ignore[method-assign]


def wait(pids: Sequence[int]) -> list[int]:
    """Return the exit codes of processes when they have ended."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
