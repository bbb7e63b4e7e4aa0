"""Load lmms-eval tasks, and score them without threads, retries or noise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import datasets
from lmms_eval.api.task import ConfigurableTask, Task, TaskConfig
from lmms_eval.tasks import TaskManager, get_task_dict
from loguru import logger
from tenacity import RetryError

from espalier.harness.errors import UserError
from espalier.harness.evaluation.data_sources import (
    AllowedSources,
    LocalData,
    OutsideSource,
    admit_own,
    allowed_sources,
    cause_of,
    kind_of_error,
    lacks_locks,
    named_data,
    origin,
)
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.evaluation.upstream import (
    Patch,
    damaged_images_refused,
    no_progress_bars,
    one_download_attempt,
    rows_mapped_here,
    task_configuration,
    task_download,
    task_files_read_in_c,
    tokens_remembered,
    without_commit,
    without_guesses,
)
from espalier.harness.ranks import without_launcher
from espalier.harness.specs.hub_cache import online, way_to_download
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.folder_checks import check_folder

#: Advice in error lines about data that are not on this machine.
WAYS = (
    "benchmark.path=<a folder with a copy>, or before, where there is a network, "
    "python -m espalier benchmarks prefetch <name>"
)


@dataclass(frozen=True)
class LoadedBenchmark:
    """The task, or all leaf tasks of a group, with their task manager.

    `ours`: they come from the include path, not from lmms-eval. `data` serves their data sets from the user's folder;
    `borders` has the files that their data may name.
    """

    manager: TaskManager
    tasks: tuple[Task, ...]
    ours: bool
    data: LocalData | None = None
    borders: AllowedSources | None = None

    def arguments(self, spec: RunSpec) -> dict[str, Any]:
        """Return what lmms-eval's `simple_evaluate` takes besides the model."""
        return {
            "tasks": list(self.tasks),
            "task_manager": self.manager,
            # The first clusters may be anywhere (harness/evaluation/sample_contributions.py).
            "limit": spec.benchmark.limit if spec.benchmark.cluster is None else None,
            "batch_size": spec.engine.batch_size,
            # lmms-eval's own response cache stores nothing before a run ends; the journal does.
            "use_cache": None,
            "cache_requests": False,
            # Standard errors are computed from the samples (harness/evaluation/metric_scores.py).
            "bootstrap_iters": 0,
            "log_samples": True,
            "process_docs_parallel": 1,
            # The other back end would create an Accelerator and its global state in every process.
            "distributed_executor_backend": "torchrun",
            "cli_args": argparse.Namespace(
                process_with_media=False, output_path=str(spec.store), reasoning_tags=None
            ),
        }

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve local data sets, and refuse other files, while functions of the tasks run."""
        with (
            nullcontext() if self.data is None else self.data.serving(),
            nullcontext() if self.borders is None else self.borders.enforced(pixels=True),
            # What other authors' tasks want for their scores is not known before.
            nullcontext()
            if self.ours or self.data or not self.borders or self.borders.offline
            else online(),
        ):
            yield


def load_tasks(
    name: str,
    include_path: Path | None,
    offline: bool = True,
    template: str | None = None,
    data: LocalData | None = None,
    pinned: Mapping[str, str] | None = None,
    shelf: TaskCache | None = None,
    records: Path | None = None,
) -> LoadedBenchmark:
    """Load a task or group by name; `offline` opens no connection and gives up at once, not after four retries.

    `template` selects the prompts that a task has for one model family (its lmms_eval_specific_kwargs); a task without
    them uses its `default`. With `data` the hub is not used. `pinned` has revisions of data sets by id; for others a
    task's own file decides. `shelf` caches earlier openings. `records` is a file that the task loads in place of
    its own.

    The built-in index is read (seconds) only if `include_path` has no such name; otherwise built-in names would
    override ours.

    Only stop strings in a task's file count: lmms-eval's default for tasks without any is dropped.

    Raises:
        MissingData: its data are not on this machine, and may be on another.
        UserError: the name is unknown, its data cannot be loaded, it does not generate text, or the cache of data sets
            cannot be written.
    """
    check_folder("HF_DATASETS_CACHE, HF_HOME or HOME", Path(datasets.config.HF_DATASETS_CACHE))
    paths = [] if include_path is None else [str(include_path)]
    # A family named `default` would lose the settings outside the task's `default` table.
    family = None if template == "default" else template
    shelf = shelf or TaskCache()
    manager, is_own = manager_with(name, shelf, paths, family)
    borders = allowed_sources(data, include_path, offline)
    configs: list[TaskConfig] = []
    opened = (
        *(name, include_path, template, data and data.home, records),
        *sorted((pinned or {}).items()),
    )
    if opened != shelf.benchmark:
        shelf.benchmark = opened
        shelf.data.clear()

    def noted(**config: Any) -> TaskConfig:
        options = dict(config.get("dataset_kwargs") or {})
        if revision := (pinned or {}).get(str(config.get("dataset_path"))):
            options["revision"] = revision
        if records is not None:
            options["data_files"] = {config["test_split"]: str(records)}
        if options:
            config["dataset_kwargs"] = options
        configs.append(_AsWritten(**config))
        admit_own(borders, configs[-1])
        return configs[-1]

    try:
        with (
            nullcontext() if data is None else data.serving(loading=True),
            borders.enforced(pixels=False),
            one_download_attempt() if offline or data is not None else nullcontext(),
            shelved_data(shelf),
            task_configuration(noted),
            damaged_images_refused(),  # a task may read images here already
            rows_mapped_here(),
        ):
            tree = get_task_dict([name], manager, "chat")
    except UserError as error:
        kind = kind_of_error(error) if data is None else UserError
        if isinstance(error, OutsideSource) and configs:
            raise kind(f"benchmark.task={name!r}: {error} ({origin(configs[-1])})") from error
        raise kind(str(error)) from error
    except Exception as error:  # a task's functions may raise anything
        cause = error.last_attempt.exception() if isinstance(error, RetryError) else error
        if lacks_locks(cause):
            raise UserError(
                f"benchmark.task={name!r}: its data cannot be loaded: No locks available in "
                f"{str(datasets.config.HF_DATASETS_CACHE)!r}; valid: HF_DATASETS_CACHE=<a folder on a local disk>, "
                "on a file system with locks"
            ) from error
        kind = kind_of_error(cause) if data is None else UserError
        if isinstance(cause, UserError):
            raise kind(str(cause)) from error
        if cause is None or not configs:
            raise cause or error from error
        doing = "its data cannot be loaded" if isinstance(error, RetryError) else "row 0"
        is_absent = data is None and isinstance(error, RetryError)
        way = f"; valid: {way_to_download(offline)}{WAYS}" if is_absent else ""
        raise kind(
            f"benchmark.task={name!r}: {doing}: {cause_of(cause)} ({origin(configs[-1])}){way}"
        ) from error
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
    return LoadedBenchmark(manager, tasks, is_own, data, borders)


class _AsWritten(TaskConfig):
    """A task's configuration with stop strings only if its author wrote them.

    `TaskConfig` fills in the separator of few-shot examples, a blank line, for tasks without stop strings, and the
    result does not show the difference. lmms-eval's own model classes, except one, never cut there, nor do the original
    evaluations.
    """

    generation_kwargs: dict[str, Any] | None

    def __post_init__(self) -> None:
        """Remove the default stop string unless the author wrote one."""
        written = self.generation_kwargs
        # Tasks of a group may share the table.
        self.generation_kwargs = None if written is None else dict(written)
        super().__post_init__()
        if self.generation_kwargs is not None and "until" not in (written or {}):
            del self.generation_kwargs["until"]


def check_metrics(tasks: Sequence[Task], wanted: Sequence[str]) -> None:
    """Raise UserError if a reported metric does not exist in the tasks."""
    valid = sorted(metric_names(tasks))
    for name in wanted:
        if name not in valid:
            raise UserError(f"benchmark.metrics: {name!r} is unknown; valid: {', '.join(valid)}")


def metric_names(tasks: Sequence[Task]) -> dict[str, tuple[str, str]]:
    """Map reported names to (task, metric); the name is the metric, or `task/metric` if there are several tasks."""
    several = len(tasks) > 1
    return {
        f"{task.config.task}/{metric}" if several else metric: (task.config.task, metric)
        for task in tasks
        for metric in task.aggregation()
    }


@contextmanager
def scoring(loaded: LoadedBenchmark) -> Iterator[None]:
    """Prepare lmms-eval and the tasks for `simple_evaluate`, and restore them afterwards."""
    with (
        named_data(loaded.tasks),
        without_launcher(),
        quiet(),
        tokens_remembered(),
        loaded.serving(),
        without_commit(),
        without_guesses(),
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Send prints of lmms-eval and its tasks to stderr, log warnings only, and hide progress bars."""
    logger.remove()
    # The current stderr, which may have been replaced.
    logger.add(lambda line: print(line, end="", file=sys.stderr), level="WARNING")
    with redirect_stdout(sys.stderr), no_progress_bars():
        yield


def _leaves(tree: Mapping[Any, Any]) -> Iterator[Task]:
    for node in tree.values():
        if isinstance(node, Mapping):
            yield from _leaves(node)
        else:
            yield node


#: Attributes that loading sets in a task: the data with and without pictures, and their origin.
LOADED = ("dataset", "dataset_no_image", "DATASET_PATH")


def manager_with(
    name: str, shelf: TaskCache, paths: Sequence[str], family: str | None = None
) -> tuple[TaskManager, bool]:
    """Return a manager that knows a task, and whether a folder declares it.

    lmms-eval's own tasks are read only if no folder does.

    Raises:
        UserError: the name is unknown.
    """
    manager = manager_of(shelf, paths, False, family)
    names = manager.all_tasks
    if name not in names:
        manager = manager_of(shelf, paths, True, family)
        if name not in manager.all_tasks:
            close = get_close_matches(name, manager.all_tasks, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(
                f"benchmark.task={name!r} is unknown{hint}; valid: {', '.join(names)}"
                " and the tasks of lmms-eval"
            )
    return manager, name in names


def manager_of(
    shelf: TaskCache, paths: Sequence[str], defaults: bool, family: str | None
) -> TaskManager:
    """Return a new task manager; only the index of task files is cached.

    Cost: the first time a parse of each task file, a second if lmms-eval's own are included.
    """
    place = (*paths, defaults)

    class Indexed(TaskManager):
        def initialize_tasks(self, *args: Any, **options: Any) -> dict[str, Any]:
            if place not in shelf.indices:
                shelf.indices[place] = super().initialize_tasks(*args, **options)
            return deepcopy(shelf.indices[place])

    with task_files_read_in_c():
        return Indexed(include_path=list(paths), include_defaults=defaults, model_name=family)


def shelved_data(shelf: TaskCache) -> Patch:
    """Let tasks load their data through a cache.

    Only whole data sets are cached: their rows are read anew at each access, so that a task cannot change another
    task's documents. Streams and data of other classes are loaded each time.
    """

    def load(
        download: Callable[..., None], task: ConfigurableTask, kwargs: dict[str, Any] | None = None
    ) -> None:
        # A task of several subtasks loads them in turn, each under its own name.
        key = (task.config.task, task.DATASET_PATH, task.DATASET_NAME, repr(kwargs))
        # Copies cost little, because data sets share their tables.
        loaded = deepcopy(shelf.data.get(key))
        if loaded is None:
            download(task, kwargs)
            attributes = {name: getattr(task, name) for name in LOADED}
            data = (attributes["dataset"], attributes["dataset_no_image"])
            if all(
                isinstance(splits, dict)
                and all(isinstance(split, datasets.Dataset) for split in splits.values())
                for splits in data
            ):
                shelf.data[key] = deepcopy({**attributes, "kwargs": kwargs})
            return
        for name in LOADED:
            setattr(task, name, loaded[name])
        if kwargs is not None:
            # Loading removes lmms-eval's own arguments.
            kwargs.clear()
            kwargs.update(loaded["kwargs"])

    return task_download(load)
