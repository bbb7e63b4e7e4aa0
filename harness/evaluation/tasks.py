"""Loading lmms-eval tasks, and scoring them without threads, retries or noise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import lmms_eval.api.task
import lmms_eval.evaluator
from lmms_eval.api.task import ConfigurableTask, Task, TaskConfig
from lmms_eval.tasks import TaskManager, get_task_dict
from loguru import logger
from tenacity import RetryError, stop_after_attempt
from tqdm import tqdm

from harness.errors import UserError
from harness.evaluation.local import LocalData
from harness.evaluation.samples import Failure, Key
from harness.folders import check_folder


@dataclass(frozen=True)
class Loaded:
    """The task, or all leaf tasks of a group, with the manager that knows them.

    `ours` says that they come from the include path, not from lmms-eval; `data` is what serves their data sets where
    these lie in a folder of the user's.
    """

    manager: TaskManager
    tasks: tuple[Task, ...]
    ours: bool
    data: LocalData | None = None

    def serving(self) -> AbstractContextManager[None]:
        """Return the context in which functions of the tasks find their data sets."""
        return nullcontext() if self.data is None else self.data.serving()


def load_tasks(
    name: str,
    include_path: Path | None,
    offline: bool = True,
    template: str | None = None,
    data: LocalData | None = None,
) -> Loaded:
    """Load a task or group by name; `offline` gives up at once instead of after four retries.

    `template` picks the prompts that a task writes for one model family (its lmms_eval_specific_kwargs); a task without
    such takes its `default`. With `data` the hub is not asked.

    The built-in index is read (seconds) only when the name is not under `include_path`; otherwise
    built-in names would win over ours.

    Stop strings are those that a task names: lmms-eval's default for tasks without any is left out.

    Raises:
        UserError: the name is unknown, its data cannot be loaded, it does not generate text, or the cache of data sets
            cannot be written.
    """
    check_folder("HF_DATASETS_CACHE, HF_HOME or HOME", Path(datasets.config.HF_DATASETS_CACHE))
    paths = [] if include_path is None else [str(include_path)]
    # A family named `default` would lose what stands beside the task's `default`.
    family = None if template == "default" else template
    manager = TaskManager(include_path=paths, include_defaults=False, model_name=family)
    own = manager.all_tasks
    if name not in own:
        manager = TaskManager(include_path=paths, include_defaults=True, model_name=family)
        if name not in manager.all_tasks:
            near = get_close_matches(name, manager.all_tasks, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(
                f"benchmark.task={name!r} is unknown{hint}; valid: {', '.join(own)}"
                " and the tasks of lmms-eval"
            )
    retry = ConfigurableTask.download.retry
    stop = stop_after_attempt(1) if offline or data is not None else retry.stop
    try:
        with (
            nullcontext() if data is None else data.serving(loading=True),
            mock.patch.object(retry, "stop", stop),
            mock.patch.object(lmms_eval.api.task, "TaskConfig", _AsWritten),
        ):
            tree = get_task_dict([name], manager, "chat")
    except RetryError as error:
        cause = error.last_attempt.exception()
        if isinstance(cause, UserError):
            raise cause from error
        line = next(iter(str(cause).splitlines()), "")
        raise UserError(
            f"benchmark.task={name!r}: its data cannot be loaded: {type(cause).__name__}: {line}"
        ) from cause
    tasks = tuple(_leaves(tree))
    for task in tasks:
        if task.OUTPUT_TYPE != "generate_until":
            raise UserError(
                f"benchmark.task={name!r}: {task.config.task} is of type {task.OUTPUT_TYPE};"
                " valid: generate_until"
            )
        if (task.config.repeats or 1) != 1:
            raise UserError(
                f"benchmark.task={name!r}: repeats={task.config.repeats} is not supported; valid: 1"
            )
    return Loaded(manager, tasks, ours=name in own, data=data)


class _AsWritten(TaskConfig):
    """A task's configuration whose `generation_kwargs` name stop strings only where its author did.

    `TaskConfig` fills in the separator of few-shot examples, a blank line, for tasks that name none; written and filled
    in look alike afterwards. lmms-eval's own model classes, but one, never cut there, nor do the original evaluations.
    """

    generation_kwargs: dict[str, Any] | None

    def __post_init__(self) -> None:
        """Note what is written before the defaults come, and take back the one that was not."""
        written = self.generation_kwargs
        if written is not None:
            # Tasks of a group may share the table.
            self.generation_kwargs = dict(written)
        super().__post_init__()
        if self.generation_kwargs is not None and "until" not in (written or {}):
            del self.generation_kwargs["until"]


def check_metrics(tasks: Sequence[Task], wanted: Sequence[str]) -> None:
    """Raise UserError if a metric that the benchmark reports does not exist in its task."""
    valid = sorted(metric_names(tasks))
    for name in wanted:
        if name not in valid:
            raise UserError(f"benchmark.metrics: {name!r} is unknown; valid: {', '.join(valid)}")


def metric_names(tasks: Sequence[Task]) -> dict[str, tuple[str, str]]:
    """Map reported names to (task, metric): the bare metric, or `task/metric` of several tasks."""
    several = len(tasks) > 1
    return {
        f"{task.config.task}/{metric}" if several else metric: (task.config.task, metric)
        for task in tasks
        for metric in task.aggregation()
    }


def guard_scoring(
    task: Task, failures: list[Failure], beside: Callable[[Key], list[str]] = lambda key: []
) -> None:
    """Make `task.process_results` skip and name a sample when it raises, without retries.

    `beside` returns what the task scores beside the answer of a sample: a judge's verdict.

    lmms-eval hands over the document but not its id. Serial scoring (`process_docs_parallel=1`)
    walks the documents in ascending order, once for each filter, so counting the calls gives the
    id. A sample without metric values enters no aggregate.
    """
    method = type(task).process_results
    score: Callable[..., Mapping[str, Any]] = partial(getattr(method, "__wrapped__", method), task)
    seen = 0

    def guarded(doc: Any, results: Any, **more: Any) -> Mapping[str, Any]:
        nonlocal seen
        ids = sorted({instance.doc_id for instance in task.instances})
        doc_id = ids[seen % len(ids)]
        seen += 1
        try:
            return score(doc, [*results, *beside((task.config.task, doc_id))], **more)
        except Exception as error:  # any bug in a task's scoring must name its sample
            failures.append(Failure.from_exception((task.config.task, doc_id), error))
            return {}

    task.process_results = guarded


@contextmanager
def quiet() -> Iterator[None]:
    """Send what lmms-eval and its tasks print to stderr, warnings only, without progress bars."""
    logger.remove()
    logger.add(_complain, level="WARNING")
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(mock.patch.object(lmms_eval.evaluator, "tqdm", _silent))
        stack.enter_context(mock.patch.object(lmms_eval.api.task, "tqdm", _silent))
        if datasets.is_progress_bar_enabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield


def _silent(*args: Any, **more: Any) -> Any:
    return tqdm(*args, **more | {"disable": True})


def _complain(line: str) -> None:
    """Look stderr up at each line; it may have been replaced since."""
    sys.stderr.write(line)


def _leaves(tree: Mapping[Any, Any]) -> Iterator[Task]:
    for node in tree.values():
        if isinstance(node, Mapping):
            yield from _leaves(node)
        else:
            yield node
