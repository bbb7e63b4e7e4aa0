"""The hub repositories that a benchmark's tasks read, and their missing files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.file_download import DryRunFileInfo
from tqdm import tqdm

from espalier.harness.errors import UserError
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.revisions import MODEL_FILES
from espalier.harness.specs.run_spec import ModelSpec


@dataclass(frozen=True)
class Wanted:
    """Files of one repository.

    Attributes:
        name: owner and name on the hub.
        kind: `dataset` or `model`.
        revision: commit, branch or tag; None: the main branch.
        patterns: which files; None: all.
        config: the data set's configuration that is read.
        unpack: where archives of it belong, below HF_HOME; None: nothing is unpacked.
        link: whether that place is a link to the downloaded files instead.
    """

    name: str
    kind: str = "dataset"
    revision: str | None = None
    patterns: tuple[str, ...] | None = None
    config: str | None = None
    unpack: str | None = None
    link: bool = False


def data_sets(benchmark: BenchmarkSpec) -> tuple[Wanted, ...]:
    """Return the repositories in the task files of a benchmark, without those that task functions read.

    Raises:
        UserError: the task is unknown.
    """
    wanted = {_wanted(config, benchmark.dataset.pinned): None for config in _configs(benchmark)}
    return tuple(part for part in wanted if part is not None)


def checkpoint(model: ModelSpec) -> Wanted:
    """Return the files of a model's checkpoint that a run reads.

    Raises:
        UserError: the model comes from no hub.
    """
    if model.hub is None or model.weights == "random" or model.path is not None:
        raise UserError(
            f"model={model.name!r} is nothing to download; valid: a model with model.hub"
        )
    return Wanted(model.hub, "model", model.revision, MODEL_FILES)


def settled(wanted: Wanted) -> Wanted:
    """Return the needed part of a data set, with the files of its configuration by name; others are not downloaded.

    Tasks load a configuration with all its splits, so these count too. Cost: a few requests to the hub.
    """
    if wanted.kind != "dataset" or wanted.unpack is not None:
        return wanted
    # The library takes seconds to import.
    import datasets

    # Whoever may not see the repository, or cannot reach it, learns it from the hub's own library.
    HfApi().repo_info(wanted.name, repo_type="dataset", revision=wanted.revision)
    builder = datasets.load_dataset_builder(
        wanted.name, name=wanted.config, revision=wanted.revision
    )
    listed = builder.config.data_files or {}
    files = [
        str(file).partition("@")[2].partition("/")[2] for paths in listed.values() for file in paths
    ]
    # What names a file exactly is no pattern.
    patterns = tuple(escape(name) for name in ("README.md", *files))
    return replace(wanted, patterns=patterns if files else None)


def missing(wanted: Wanted) -> list[DryRunFileInfo]:
    """Return the files that are not in the cache. Cost: one request to the hub, and one for each file."""
    files = snapshot_download(
        wanted.name,
        repo_type=wanted.kind,
        revision=wanted.revision,
        allow_patterns=None if wanted.patterns is None else list(wanted.patterns),
        dry_run=True,
        tqdm_class=_Silent,
    )
    return [file for file in files if file.will_download]


class _Silent(tqdm):
    """A silent progress bar: listing takes seconds, and only downloads need a bar."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})


def _configs(benchmark: BenchmarkSpec) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each task file of a benchmark; functions in them are not imported."""
    # Both import all of lmms-eval, which takes seconds and is not needed for data of this repository.
    from lmms_eval.tasks import TaskManager
    from lmms_eval.utils import load_yaml_config

    paths = [] if benchmark.include_path is None else [str(benchmark.include_path)]
    manager = TaskManager(include_path=paths, include_defaults=False)
    if benchmark.task not in manager.all_tasks:
        manager = TaskManager(include_path=paths, include_defaults=True)

    def below(name: str) -> Iterator[Mapping[str, Any]]:
        entry = manager.task_index.get(name)
        if entry is None:
            raise UserError(
                f"benchmark.task={name!r} is unknown; valid: the tasks of lmms-eval and of tasks/"
            )
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
