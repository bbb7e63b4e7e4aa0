"""Metrics that a benchmark makes of its tasks' own: which ones they need, and whether all names exist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import metric_names
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, Derived

#: Starts a member that stands for one metric of every task of a group.
EVERY = "*/"


def members_of(made: Derived, names: Iterable[str]) -> list[str]:
    """Return the metrics that a derived one is made of, in the order of the tasks."""
    known = list(names)
    found = []
    for member in made.of:
        if member.startswith(EVERY):
            found += [name for name in known if name.partition("/")[2] == member[len(EVERY) :]]
        elif member in known:
            found.append(member)
    return found


def needed(benchmark: BenchmarkSpec, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return the tasks' own metrics that a benchmark reports or derives others from; none stands for all."""
    if not benchmark.metrics:
        return ()
    names = metric_names(tasks)
    derived = [one for made in benchmark.derived.values() for one in members_of(made, names)]
    own = [name for name in benchmark.metrics if name not in benchmark.derived]
    return tuple(dict.fromkeys([*own, *derived]))


def check_derived(tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
    """Raise UserError if a metric that a benchmark derives others from does not exist in its tasks."""
    names = metric_names(tasks)
    for name, made in benchmark.derived.items():
        if name in names:
            raise UserError(
                f"benchmark.derived.{name} is a metric of the task itself; valid: another name"
            )
        for member in made.of:
            if not members_of(Derived(made.how, (member,)), names):
                raise UserError(
                    f"benchmark.derived.{name}: {member!r} is unknown; valid: {', '.join(sorted(names))}"
                )
