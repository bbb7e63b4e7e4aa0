"""`benchmark=task:<name>`: any task of lmms-eval without a file of its own, as a source of configs beside conf/."""

from __future__ import annotations

from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from espalier.harness.config.lmms_task_files import Leaf, leaves

#: What such a benchmark's name begins with.
PREFIX = "task:"
#: Where Hydra looks for it (hydra.searchpath in conf/config.yaml).
PLACE = "lmms-eval://tasks"
_FOLDER = f"benchmark/{PREFIX}"


def register() -> None:
    """Make the source known to Hydra, which `hydra.searchpath` in conf/config.yaml names; again does no harm."""
    Plugins.instance().register(TaskSource)


def section(name: str) -> dict[str, Any]:
    """Return what a file of conf/benchmark would say about a task, group or tag of lmms-eval.

    Its metrics are the task's own in their order; the first is the headline. Of a group they are the metrics of each of
    its tasks, and before them the mean over tasks of every metric that all of them have.

    Raises:
        UserError: there is no such task, or it cannot be run.
    """
    found = leaves(name)
    first = found[0]
    common = [one for one in first.metrics if all(one in leaf.metrics for leaf in found)]
    metrics = list(first.metrics)
    if len(found) > 1:
        each = [f"{leaf.name}/{metric}" for leaf in found for metric in leaf.metrics]
        metrics = [*common, *each]
    return {
        "defaults": ["/base/benchmark@_here_", "_self_"],
        "name": PREFIX + name,
        "task": name,
        "metrics": metrics,
        "headline": metrics[0],
        "derived": {one: {"mean": [f"*/{one}"]} for one in common} if len(found) > 1 else {},
        "higher_is_better": first.higher_is_better(metrics[0].rpartition("/")[2]),
        "dataset": {
            "path": _shared(leaf.settings.get("dataset_path") for leaf in found),
            "config": _shared(leaf.settings.get("dataset_name") for leaf in found),
            "revision": _shared(_revision(leaf) for leaf in found),
            "split": _shared(_split(leaf) for leaf in found),
        },
    }


class TaskSource(ConfigSource):
    """Serves a benchmark for each task that lmms-eval has; it lists none, or errors would list two thousand names."""

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
        """Say that the source can be asked; a package that is absent has no tasks."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Say that there is no folder of such configs."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Say whether a name asks for a task; whether there is one, `load_config` tells with the names near it."""
        return config_path.startswith(_FOLDER)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return no names."""
        return []


def _split(leaf: Leaf) -> Any:
    return leaf.settings.get("test_split") or leaf.settings.get("validation_split")


def _revision(leaf: Leaf) -> Any:
    return (leaf.settings.get("dataset_kwargs") or {}).get("revision")


def _shared(values: Any) -> str | None:
    """Return what all tasks of a group have in common, as text."""
    found = {None if value is None else str(value) for value in values}
    return found.pop() if len(found) == 1 else None
