"""A benchmark on its fixture: its command line, and its metrics under answers that are told."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from espalier.harness.evaluation.evaluate import Evaluation, evaluate_session, open_benchmark
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.paths import CONF
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from tests import commands
from tests.benchmarks.answering import Told
from tests.benchmarks.fixtures import ARGUMENTS, FIXTURES, Answer

#: Benchmarks of conf/benchmark whose samples are drawn by the harness, not read from a data set.
DRAWN = "seedling_"

BENCHMARKS = sorted(
    path.stem for path in (CONF / "benchmark").glob("*.yaml") if not path.stem.startswith(DRAWN)
)

#: Indices of task files, and the data of the last benchmark, for all tests of a process.
SHELF = TaskCache()

#: Those that are run; tests/benchmarks/test_benchmarks_run.py names what is missing.
RUN = sorted(set(BENCHMARKS) & set(FIXTURES))


def arguments(name: str, root: Path, store: Path) -> list[str]:
    """Return the command line of a benchmark on its fixture: all rows, few tokens."""
    return [
        *(f"benchmark={name}", f"benchmark.path={root}", f"store={store}", "limit=null"),
        *("engine.batch_size=2", "engine.warmup=0", "engine.paired=0", "model.device=cpu"),
        *("+benchmark.generation.max_new_tokens=4", "json=true", "model.closed_vocabulary=false"),
        *ARGUMENTS.get(name, lambda root: ())(root),
    ]


def spec_of(name: str, root: Path, store: Path) -> RunSpec:
    """Return the run of this command line; a benchmark is composed once in a process."""
    return replace(_composed(name, root), store=store)


@cache
def _composed(name: str, root: Path) -> RunSpec:
    return commands.spec_of(*arguments(name, root, root.parent / "store"))


def told(spec: RunSpec, answer: Answer) -> Evaluation:
    """Evaluate the answers that a function of the documents gives."""
    loaded = open_benchmark(spec, shelf=SHELF)
    journal = Store(spec.store).run("0" * 16).journal
    return evaluate_session(spec, Told(loaded.tasks, answer), journal, loaded=loaded)


def metrics_of(spec: RunSpec, answer: Answer) -> dict[str, float | None]:
    """Return the value of each metric of these answers."""
    return {name: found["value"] for name, found in told(spec, answer).metrics.items()}
