"""The repositories of the hub that a benchmark's task files name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError
from espalier.harness.evaluation.task_cache import TaskCache
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.hub_files import Wanted


def data_sets(benchmark: BenchmarkSpec) -> tuple[Wanted, ...]:
    """Return the repositories in the task files of a benchmark, without those that task functions read.

    Raises:
        UserError: the task is unknown.
    """
    wanted = {_wanted(config, benchmark.dataset.pinned): None for config in _configs(benchmark)}
    return tuple(part for part in wanted if part is not None)


def _configs(benchmark: BenchmarkSpec) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each task file of a benchmark; functions in them are not imported."""
    # Both import all of lmms-eval, which takes seconds and is not needed for data of this repository.
    from lmms_eval.utils import load_yaml_config

    from espalier.harness.evaluation.lmms_tasks import manager_with

    paths = [] if benchmark.include_path is None else [str(benchmark.include_path)]
    manager, _ = manager_with(benchmark.task, TaskCache(), paths)

    def below(name: str) -> Iterator[Mapping[str, Any]]:
        entry = manager.task_index.get(name)
        if entry is None:
            raise UserError(f"benchmark.task={benchmark.task!r} has {name!r}, which is unknown")
        if entry["type"] == "tag":
            members = entry["task"]
        else:
            config = load_yaml_config(str(entry["yaml_path"]), mode="simple")
            if "group" not in config:
                yield config
                return
            members = config["task"]
        for member in members:
            yield from below(member if isinstance(member, str) else member["task"])

    yield from below(benchmark.task)


def _wanted(config: Mapping[str, Any], pinned: Mapping[str, str]) -> Wanted | None:
    """Return the repository of one task file at the pinned revision; None if its data are local."""
    path, kwargs = config.get("dataset_path"), config.get("dataset_kwargs") or {}
    # Formats are names without an owner; folders are paths.
    if path is None or path.count("/") != 1 or Path(path).is_absolute():
        return None
    revision = pinned.get(path, kwargs.get("revision"))
    if not kwargs.get("video"):
        return Wanted(path, revision=revision, config=config.get("dataset_name"))
    return Wanted(
        path,
        revision=revision,
        unpack=kwargs["cache_dir"],
        link=bool(kwargs.get("create_link")),
    )
