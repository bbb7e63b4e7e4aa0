"""lmms-eval's own loading, with a shelf in front of it: indices of task files and data sets are read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
from lmms_eval.api.task import ConfigurableTask
from lmms_eval.tasks import TaskManager

from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.evaluation.upstream import Patch, task_download

#: What loading data sets in a task: the data, as they are and without pictures, and where they came from.
LOADED = ("dataset", "dataset_no_image", "DATASET_PATH")


def manager_of(
    shelf: TaskCache, paths: Sequence[str], defaults: bool, family: str | None
) -> TaskManager:
    """Return a task manager of its own for each opening; only the index of task files is kept.

    Cost: the first time a parse of each task file, seconds where those of lmms-eval are among them.
    """

    class Indexed(TaskManager):
        def initialize_tasks(self, *args: Any, **more: Any) -> dict[str, Any]:
            def read() -> dict[str, Any]:
                index: dict[str, Any] = super(Indexed, self).initialize_tasks(*args, **more)
                return index

            return shelf.index((*paths, defaults), read)

    return Indexed(include_path=list(paths), include_defaults=defaults, model_name=family)


def shelved_data(shelf: TaskCache) -> Patch:
    """Let tasks load their data from a shelf, and put there what it lacks.

    Only whole data sets are kept, whose rows are read anew at each look, so that what a task does to a document
    happens to nobody else's. What is streamed, or made of other classes, is loaded each time.
    """

    def load(
        download: Callable[..., None], task: ConfigurableTask, kwargs: dict[str, Any] | None
    ) -> None:
        # A task of several subtasks loads one after the other, each under another name.
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
            # Loading takes out of them what is meant for lmms-eval alone.
            kwargs.clear()
            kwargs.update(loaded["kwargs"])

    return task_download(load)


def _in_tables(data: Any) -> bool:
    """Whether these are splits that lie in tables."""
    return isinstance(data, dict) and all(
        isinstance(split, datasets.Dataset) for split in data.values()
    )
