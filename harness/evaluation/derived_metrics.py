"""Metrics that a benchmark derives from those of its tasks: the metrics they need, and a check of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.lmms_tasks import metric_names
from espalier.harness.specs.benchmark_spec import BenchmarkSpec, Derived

#: Prefix of a member that means one metric of every task of a group.
EVERY = "*/"


def members_of(derived: Derived, names: Iterable[str]) -> list[str]:
    """Return the metrics that a derived metric is computed from, in the order of the tasks."""
    available = list(names)
    members = []
    for member in derived.of:
        if member.startswith(EVERY):
            members += [
                name for name in available if name.partition("/")[2] == member[len(EVERY) :]
            ]
        elif member in available:
            members.append(member)
    return members


def needed_metrics(benchmark: BenchmarkSpec, tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return the task metrics that a benchmark reports or derives metrics from; an empty tuple means all."""
    if not benchmark.metrics:
        return ()
    names = metric_names(tasks)
    derived = [
        member for formula in benchmark.derived.values() for member in members_of(formula, names)
    ]
    task_metrics = [name for name in benchmark.metrics if name not in benchmark.derived]
    return tuple(dict.fromkeys([*task_metrics, *derived]))


def check_derived(tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
    """Raise UserError if a member of a derived metric does not exist in the tasks."""
    names = metric_names(tasks)
    for name, formula in benchmark.derived.items():
        if name in names:
            raise UserError(
                f"benchmark.derived.{name} is a metric of the task itself; valid: another name"
            )
        for member in formula.of:
            if not members_of(Derived(formula.how, (member,)), names):
                raise UserError(
                    f"benchmark.derived.{name}: {member!r} is unknown; valid: {', '.join(sorted(names))}"
                )
