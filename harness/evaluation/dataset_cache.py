"""Cache lmms-eval's loading: indices of task files and data sets are read once per command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
from lmms_eval.api.task import ConfigurableTask
from lmms_eval.tasks import TaskManager

from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.evaluation.upstream import Patch, task_download

#: Attributes that loading sets in a task: the data with and without pictures, and their origin.
LOADED = ("dataset", "dataset_no_image", "DATASET_PATH")


def manager_of(
    shelf: TaskCache, paths: Sequence[str], defaults: bool, family: str | None
) -> TaskManager:
    """Return a new task manager; only the index of task files is cached.

    Cost: the first time a parse of each task file, seconds if lmms-eval's own are included.
    """

    class Indexed(TaskManager):
        def initialize_tasks(self, *args: Any, **more: Any) -> dict[str, Any]:
            def read() -> dict[str, Any]:
                index: dict[str, Any] = super(Indexed, self).initialize_tasks(*args, **more)
                return index

            return shelf.index((*paths, defaults), read)

    return Indexed(include_path=list(paths), include_defaults=defaults, model_name=family)


def shelved_data(shelf: TaskCache) -> Patch:
    """Let tasks load their data through a cache.

    Only whole data sets are cached: their rows are read anew at each access, so that a task cannot change another
    task's documents. Streams and data of other classes are loaded each time.
    """

    def load(
        download: Callable[..., None], task: ConfigurableTask, kwargs: dict[str, Any] | None
    ) -> None:
        # A task of several subtasks loads them in turn, each under its own name.
        key = (task.config.task, task.DATASET_PATH, task.DATASET_NAME, repr(kwargs))
        loaded = shelf.taken(key)
        if loaded is None:
            download(task, kwargs)
            left = {name: getattr(task, name) for name in LOADED}
            if all(map(_in_tables, (left["dataset"], left["dataset_no_image"]))):
                shelf.put(key, {**left, "kwargs": kwargs})
            return
        for name in LOADED:
            setattr(task, name, loaded[name])
        if kwargs is not None:
            # Loading removes lmms-eval's own arguments.
            kwargs.clear()
            kwargs.update(loaded["kwargs"])

    return task_download(load)


def _in_tables(data: Any) -> bool:
    """Return whether all splits are whole tables."""
    return isinstance(data, dict) and all(
        isinstance(split, datasets.Dataset) for split in data.values()
    )
