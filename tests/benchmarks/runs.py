"""A benchmark on its fixture: its command line, and its metrics under stated answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from lmms_eval.api.task import Task

from espalier.harness.evaluation.evaluate import Evaluation, evaluate_session, open_benchmark
from espalier.harness.evaluation.lmms_tasks import LoadedBenchmark
from espalier.harness.evaluation.sample_contributions import aggregation
from espalier.harness.evaluation.stated_answers import strict_scoring
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.paths import CONF
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store import Store
from tests import commands
from tests.benchmarks.answering import AnsweringModel
from tests.benchmarks.fixtures import ARGUMENTS, FIXTURES, Answer

#: Writes a benchmark's data set and returns the folder of all of them.
Repositories = Callable[[str], Path]

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


def evaluation_of(spec: RunSpec, answer: Answer) -> Evaluation:
    """Evaluate the answers that a function of the documents gives."""
    loaded = open_benchmark(spec, shelf=SHELF)
    journal = Store(spec.store).run("0" * 16).journal
    return evaluate_session(spec, AnsweringModel(loaded.tasks, answer), journal, loaded=loaded)


def metrics_of(spec: RunSpec, answer: Answer) -> dict[str, float | None]:
    """Return the value of each metric of these answers."""
    return {name: metric["value"] for name, metric in evaluation_of(spec, answer).metrics.items()}


@dataclass(frozen=True)
class Scored:
    """A benchmark on its fixture, whose tasks score answers without a run; within `scoring` of the benchmark."""

    loaded: LoadedBenchmark
    spec: RunSpec

    def metrics(self, answer: Answer) -> dict[str, float]:
        """Return each metric of answers that a function of the document gives."""
        values = {}
        for task in self.loaded.tasks:
            score = strict_scoring(
                partial(type(task).process_results, task), self.spec.benchmark.answers
            )
            rows = [score(doc, [answer(doc)]) for doc in map(dict, task.eval_docs)]
            for metric in task.aggregation():
                raw = [row[metric] for row in rows if metric in row]
                if raw:
                    with aggregation(task, metric) as aggregate:
                        values[self.name(task, metric)] = aggregate(raw)
        # Files for a server have no value.
        return {name: value for name, value in values.items() if value is not None}

    def better(self, name: str) -> int:
        """Return 1 for a metric of which more is better, -1 for one of which less is."""
        signs = {
            self.name(task, metric): 1 if is_higher else -1
            for task in self.loaded.tasks
            for metric, is_higher in task.higher_is_better().items()
        }
        return signs.get(name, 1)

    def name(self, task: Task, metric: str) -> str:
        """Return what a row calls a metric of a task."""
        return metric if len(self.loaded.tasks) == 1 else f"{task.config.task}/{metric}"


@cache
def opened(name: str, root: Path) -> Scored:
    """Return a benchmark on its fixture, which is opened once in a process."""
    spec = _composed(name, root)
    return Scored(open_benchmark(spec, shelf=SHELF), spec)
