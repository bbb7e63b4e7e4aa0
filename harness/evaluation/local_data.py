"""Data of the user for tasks of lmms-eval: copies of data sets (`benchmark.path`) in place of the hub, and own records.

Own data are written to the file that a task loads, and add the metrics of categories.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from filelock import FileLock
from huggingface_hub.errors import LocalEntryNotFoundError
from lmms_eval.api.task import Task

from espalier.harness.errors import UserError
from espalier.harness.evaluation.data_errors import damaged_file
from espalier.harness.evaluation.upstream import dataset_builder, hub_download, hub_home
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.records.record import category_metric
from espalier.harness.store.files.dataset_copies import Copies, cache_folder
from espalier.harness.store.files.digests import Digests, digest
from espalier.harness.store.files.folder_checks import check_folder

#: File that lists folders that are unpacked completely.
UNPACKED = ".unpacked"


@dataclass
class LocalData:
    """Serves a task's calls to the hub from copies of its data sets.

    A task may keep a function that it imported within `serving`; outside it, the function calls the hub.

    Args:
        copies: the folders of the data sets.
        home: folder for prepared and unpacked data of exactly this content; the copies are never written to.
    """

    copies: Copies
    home: Path
    _names: set[str] = field(default_factory=set)
    _serving: bool = False

    @contextmanager
    def serving(self, *, loading: bool = False) -> Iterator[None]:
        """Serve `load_dataset`, `snapshot_download` and `hf_hub_download`, however a task calls them.

        HF_HOME, below which tasks unpack archives and look for media, is `home` within the block. With `loading` only
        one process at a time enters it, and remains of an interrupted unpacking are removed.

        Raises (from within):
            UserError: a data set has no copy.
        """
        with ExitStack() as stack:
            self.home.mkdir(parents=True, exist_ok=True)
            if loading:
                stack.enter_context(FileLock(self.home / ".lock"))
                stack.enter_context(_unpacked_whole(self.home))
            for patch in (
                hub_home(self.home, cache_folder()),
                dataset_builder(self._builder),
                hub_download("snapshot_download", self._snapshot, lambda: self._serving),
                hub_download("hf_hub_download", self._file, lambda: self._serving),
            ):
                stack.enter_context(patch)
            self._serving = True
            try:
                yield
            finally:
                self._serving = False

    def damaged_file(self, name: str) -> str:
        """Return the start of an error line about an unreadable file in a data set's copy; "" if there is none."""
        try:
            return damaged_file(self.copies.find(name))
        except UserError:
            return ""

    def _builder(self, original: Callable[..., Any], path: str, *args: Any, **options: Any) -> Any:
        """Build a data set from its copy; formats (`json`, `parquet`) and folders are built as usual."""
        if path in datasets.packaged_modules._PACKAGED_DATASETS_MODULES or Path(path).is_absolute():
            return original(path, *args, **options)
        replaced = {"cache_dir": str(self.home / ".prepared"), "token": None, "revision": None}
        return original(str(self._find(path)), *args, **options | replaced)

    def _snapshot(
        self, repo_id: str, *, local_dir: str | Path | None = None, **options: Any
    ) -> str:
        """Return a folder of links to the files of a copy: tasks write into the folder that they downloaded.

        Equal copies share `home`, and each has its own links: another command may read one of them now.
        """
        copy = self._find(repo_id)
        links = self.home / "linked" / digest(str(copy.resolve()))[:16] / repo_id
        target = links if local_dir is None else Path(local_dir)
        shutil.copytree(
            copy,
            target,
            copy_function=_link,
            ignore=shutil.ignore_patterns(".*"),
            dirs_exist_ok=True,
        )
        return str(target)

    def _file(self, repo_id: str, filename: str, **options: Any) -> str:
        file = self._find(repo_id) / options.get("subfolder", "") / filename
        if not file.is_file():
            raise LocalEntryNotFoundError(f"benchmark.path: {str(file)!r} does not exist")
        return str(file)

    def _find(self, name: str) -> Path:
        folder = self.copies.find(name)
        self._names.add(name)
        other_names = sorted(self._names - {self.copies.main or name})
        if other_names and (self.copies.main is not None or folder == self.copies.folder):
            raise UserError(
                f"benchmark.path={str(self.copies.folder)!r}: the task reads {other_names[0]!r} besides "
                f"{self.copies.main or name!r}, and the run key would not know its content; "
                "valid: a folder that holds both by owner and name, and benchmark.dataset.path=null"
            )
        return folder


def local_data(benchmark: BenchmarkSpec) -> LocalData | None:
    """Return the local data of a benchmark with `benchmark.path`; None without it, and for own data.

    Raises:
        UserError: the folder does not have the benchmark's data set.

    Cost: `Copies.revision`.
    """
    if benchmark.path is None or benchmark.records is not None:
        return None
    copies = Copies(benchmark.path, benchmark.dataset.path)
    return LocalData(copies, cache_folder() / "espalier" / copies.revision(Digests())[:16])


@contextmanager
def _unpacked_whole(home: Path) -> Iterator[None]:
    """Remove folders that a killed process unpacked in part, and list complete ones at the end of the block."""
    listing = home / UNPACKED
    complete = set(listing.read_text(encoding="utf-8").splitlines()) if listing.exists() else set()
    for path in _unpacked(home):
        if path.name not in complete:
            _remove(path)
    yield
    listing.write_text("".join(f"{path.name}\n" for path in _unpacked(home)), encoding="utf-8")


def _unpacked(home: Path) -> list[Path]:
    return sorted(path for path in home.iterdir() if not path.name.startswith("."))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _link(source: str, target: str) -> None:
    place = os.path.realpath(source)
    if os.path.islink(target) and os.readlink(target) != place:
        os.unlink(target)  # of an equal copy that lies, or lay, elsewhere
    if not os.path.lexists(target):
        os.symlink(place, target)


def record_file(benchmark: BenchmarkSpec) -> Path | None:
    """Write the records of a benchmark on own data as JSON lines into the cache; None for other benchmarks.

    Pictures in files stay where they are; others are written next to the lines.

    Raises:
        UserError: the data are wrong, or the cache cannot be written.
    """
    table = benchmark.own_data()
    if table is None:
        return None
    check_folder("HF_DATASETS_CACHE, HF_HOME or HOME", Path(datasets.config.HF_DATASETS_CACHE))
    return table.save(cache_folder() / "espalier" / "own" / table.listing_digest()[:16])


def with_records(config: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Return a task's settings with the records' file as its data; unchanged without one."""
    if file is None:
        return dict(config)
    data_files = {"data_files": {config["test_split"]: str(file)}}
    return {**config, "dataset_kwargs": {**(config.get("dataset_kwargs") or {}), **data_files}}


def add_categories(tasks: Sequence[Task], benchmark: BenchmarkSpec) -> None:
    """Add the metrics of each category of own data to their task."""
    table = benchmark.own_data()
    if table is None:
        return
    for task in tasks:
        aggregations, better = task.aggregation(), task.higher_is_better()
        name = benchmark.headline
        for category in table.categories:
            aggregations |= {category_metric(name, category): aggregations[name]}
            better |= {category_metric(name, category): better[name]}
        task._aggregation_list, task._higher_is_better = aggregations, better
