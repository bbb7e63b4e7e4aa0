"""`benchmark=task:<name>`: any task of lmms-eval as a benchmark, without a file in conf/."""

from __future__ import annotations

from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from espalier.harness.config.lmms_task_files import REPLACED, Leaf, is_replaced, leaves

#: Prefix of such a benchmark's name.
PREFIX = "task:"
#: Where Hydra looks for it.
PLACE = "lmms-eval://tasks"
_FOLDER = f"benchmark/{PREFIX}"


def register() -> None:
    """Register the source; a second call changes nothing."""
    Plugins.instance().register(TaskSource)


def section(name: str) -> dict[str, Any]:
    """Return the section that a file of conf/benchmark would have for a task, group or tag of lmms-eval.

    Its metrics are the task's in their order; the first is the headline. A group has the mean over its tasks of every
    metric that all of them have, then the metrics of each task.

    Raises:
        UserError: there is no such task, or it cannot be run.
    """
    tasks = leaves(name)
    first = tasks[0]
    common = [metric for metric in first.metrics if all(metric in leaf.metrics for leaf in tasks)]
    metrics = list(first.metrics)
    if len(tasks) > 1:
        task_metrics = [f"{leaf.name}/{metric}" for leaf in tasks for metric in leaf.metrics]
        metrics = [*common, *task_metrics]
    return {
        "defaults": ["/base/benchmark@_here_", "_self_"],
        "name": PREFIX + name,
        "task": name,
        "include_path": REPLACED if is_replaced(name) else None,
        "sources": [REPLACED] if is_replaced(name) else [],
        "metrics": metrics,
        "headline": metrics[0],
        "derived": {metric: {"mean": [f"*/{metric}"]} for metric in common}
        if len(tasks) > 1
        else {},
        "higher_is_better": first.higher_is_better(metrics[0].rpartition("/")[2]),
        "dataset": {
            "path": _shared(leaf.settings.get("dataset_path") for leaf in tasks),
            "config": _shared(leaf.settings.get("dataset_name") for leaf in tasks),
            "revision": _shared(_revision(leaf) for leaf in tasks),
            "split": _shared(_split(leaf) for leaf in tasks),
        },
    }


class TaskSource(ConfigSource):
    """Serves a benchmark for each task of lmms-eval; it lists none, so that errors do not list two thousand names."""

    @staticmethod
    def scheme() -> str:
        """Return the word before `://` in the search path."""
        return "lmms-eval"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config of `benchmark/task:<name>`.

        Raises:
            UserError: there is no such task, or it cannot be run.
        """
        name = config_path.removeprefix(_FOLDER).removesuffix(".yaml")
        return ConfigResult(
            provider=self.provider,
            path=f"{self.scheme()}://{self.path}",
            config=OmegaConf.create(section(name)),
            header={"package": None},
        )

    def available(self) -> bool:
        """Return True: without the package, the source just has no tasks."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return False: these configs have no folder."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Return whether a name is that of a task; `load_config` refuses unknown tasks and lists similar names."""
        return config_path.startswith(_FOLDER)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return no names."""
        return []


def _split(leaf: Leaf) -> Any:
    return leaf.settings.get("test_split") or leaf.settings.get("validation_split")


def _revision(leaf: Leaf) -> Any:
    return (leaf.settings.get("dataset_kwargs") or {}).get("revision")


def _shared(values: Any) -> str | None:
    """Return the value that all tasks of a group share, as text; None: they differ."""
    distinct = {None if value is None else str(value) for value in values}
    return distinct.pop() if len(distinct) == 1 else None
