"""Files that the data of a run may name: in their own folder or the hub's cache, and not addresses."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import lmms_eval
import PIL.Image
from filelock import FileLock
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from lmms_eval.api.task import Task, TaskConfig
from tenacity import RetryError

from espalier.harness.errors import UserError
from espalier.harness.evaluation.prompt_text import texts_in
from espalier.harness.evaluation.samples import SampleErrors
from espalier.harness.evaluation.upstream import (
    column_decoded,
    dataset_builder,
    file_system_made,
    hub_downloads,
    hub_home,
    image_opened,
)
from espalier.harness.media import TRANSPARENCY
from espalier.harness.media.images import WIDE, in_8_bits, open_image
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.records.record import category_metric
from espalier.harness.store.files.dataset_copies import Copies, cache_folder
from espalier.harness.store.files.digests import Digests, digest
from espalier.harness.store.files.folder_checks import check_folder

#: Columns that hold references, besides the column that a task calls its target.
REFERENCES = ("answer", "answers")

#: The metric that only writes answers for a server, and needs no references.
SUBMISSION = "submission"


def origin(config: TaskConfig) -> str:
    """Return the origin of a task's samples, for an error line."""
    name = f", configuration {config.dataset_name!r}" if config.dataset_name else ""
    split = config.test_split or config.validation_split
    return f"data set {config.dataset_path!r}{name}, split {split!r}"


def cause_of(error: BaseException) -> str:
    """Return type and first line of the first error of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def lacks_locks(error: BaseException | None) -> bool:
    """Return whether a chain of errors has an OSError of a file system without locks, such as NFS without lockd."""
    if isinstance(error, OSError) and error.errno in (errno.ENOLCK, errno.ENOTSUP):
        return True
    return error is not None and lacks_locks(error.__cause__ or error.__context__)


def check_references(tasks: Sequence[Task], limit: int | None) -> None:
    """Raise UserError if a sample has no reference: scorers would count any answer as wrong.

    Cost: one pass over one or two columns.
    """
    for task in tasks:
        docs = task.test_docs() if task.has_test_docs() else task.validation_docs()
        target = task.config.doc_to_target
        names = {*REFERENCES, *((target,) if isinstance(target, str) else ())}
        if set(task.aggregation()) == {SUBMISSION}:
            continue
        for name in sorted(names & set(docs.column_names)):
            rows = islice(docs.with_format(None).select_columns([name]), limit)
            for row, value in enumerate(rows):
                if value[name] is None:
                    raise UserError(
                        f"benchmark.task={task.config.task!r}: {origin(task.config)}, row {row}: "
                        f"column {name!r} is empty, so that no answer could be scored"
                    )


@contextmanager
def named_data(tasks: Sequence[Task]) -> Iterator[None]:
    """Add to the error about failed samples the data set and split that `task/row` refers to."""
    try:
        yield
    except SampleErrors as error:
        names = dict.fromkeys(failure.task for failure in error.failures)
        origins = {task.config.task: origin(task.config) for task in tasks}
        where = "; ".join(
            f"{name}/<row> is of {origins[name]}" for name in names if name in origins
        )
        raise SampleErrors(error.failures, error.total, where) from error


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
        downloads: dict[str, Callable[..., Any]] = {
            "snapshot_download": self._snapshot,
            "hf_hub_download": self._file,
        }
        with ExitStack() as stack:
            self.home.mkdir(parents=True, exist_ok=True)
            if loading:
                stack.enter_context(FileLock(self.home / ".lock"))
                stack.enter_context(_unpacked_whole(self.home))
            for patch in (
                hub_home(self.home, cache_folder()),
                dataset_builder(self._builder),
                hub_downloads(downloads, lambda: self._serving),
            ):
                stack.enter_context(patch)
            self._serving = True
            try:
                yield
            finally:
                self._serving = False

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
        if path.name in complete:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    yield
    listing.write_text("".join(f"{path.name}\n" for path in _unpacked(home)), encoding="utf-8")


def _unpacked(home: Path) -> list[Path]:
    return sorted(path for path in home.iterdir() if not path.name.startswith("."))


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


#: File systems that do not reach another machine. The hub's own obeys HF_HUB_OFFLINE.
LOCAL = frozenset(
    (
        *("abstract", "file", "local", "memory", "hf", "dir", "zip", "tar", "libarchive", "rar"),
        *("reference", "generic", "cached", "blockcache", "filecache", "simplecache"),
        *("gzip", "bz2", "xz", "lzma", "lz4", "zstd"),
    )
)
#: Prefixes allowed before `::`: files inside a file.
ARCHIVES = re.compile(r"(zip|tar|gzip|bz2|xz|lzma|lz4|zstd|libarchive|rar)://")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

#: Columns that hold files; each decodes a table of `bytes` and `path`, or a path.
COLUMNS = tuple(
    getattr(datasets, name)
    for name in ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh")
    if hasattr(datasets, name)
)


class OutsideSource(UserError):
    """The data name a file or an address that a run may not open."""


class MissingData(UserError):
    """The data are not on this machine."""


class DistantSource(OutsideSource, MissingData):
    """The data name another machine."""


#: What the libraries raise for data that are not on this machine.
MISSING = (
    *(OfflineModeIsEnabled, LocalEntryNotFoundError, MissingData),
    *(ConnectionError, datasets.exceptions.DatasetNotFoundError, FileNotFoundError),
)


def kind_of_error(error: BaseException | None) -> type[UserError]:
    """Return the kind of an error of opening data, by what caused it."""
    while error is not None and not isinstance(error, MISSING):
        retried = error.last_attempt.exception() if isinstance(error, RetryError) else None
        error = retried or error.__cause__ or error.__context__
    if isinstance(error, DistantSource):
        return DistantSource
    return UserError if error is None else MissingData


@dataclass(frozen=True)
class AllowedSources:
    """Files that a run of a benchmark may open.

    Attributes:
        digested: folder of the data set; its files, except hidden ones, are in the run key. None: the hub's.
        folders: further folders: the hub's cache, the task's files, unpacked data.
        offline: whether connections are refused.
        transparency: how transparent pictures of image columns are drawn.
    """

    digested: Path | None
    folders: list[Path]
    offline: bool = True
    transparency: str = TRANSPARENCY[0]

    def place(self, name: str) -> str:
        """Return the path of a file that the data name; a relative path is searched in the data's folders first.

        A chain such as `zip://a.png::/data/all.zip` leads to its last file.

        Raises:
            UserError: an address, or a file elsewhere, also by `..` or a link.
        """
        # An absolute path may hold any characters.
        *inner, last = [name] if os.path.isabs(name) else name.split("::")
        scheme = SCHEME.match(last)
        if scheme is not None and scheme[1] not in ("file", "local"):
            raise OutsideSource(f"{name!r} in the data is an address; valid: {self._valid()}")
        if not all(ARCHIVES.match(hop) for hop in inner):
            raise OutsideSource(
                f"{name!r} in the data is a chain of addresses; valid: {self._valid()}"
            )
        path = self._inside(name, last[scheme.end() :] if scheme else last)
        return "::".join((*inner, path))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a chat with checked paths of pictures and videos; see `place`."""
        return [
            {**turn, "content": [self._part(part) for part in turn["content"]]}
            if not isinstance(turn["content"], str)
            else dict(turn)
            for turn in messages
        ]

    @contextmanager
    def enforced(self, pixels: bool) -> Iterator[None]:
        """Check every file that `datasets` and Pillow open, and every file system that is made.

        With `pixels`, pictures of image columns are converted as by `open_image` where a task's own `convert` would
        lose content. It must be off while a data set is prepared: its rows outlive the run.
        """
        with ExitStack() as stack:
            for column in COLUMNS:
                read = partial(self._decode, pixels and column is datasets.Image)
                stack.enter_context(column_decoded(column, read))
            stack.enter_context(image_opened(self._open))
            stack.enter_context(file_system_made(self._file_system))
            yield

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        kind = part["type"]
        if kind == "text" or kind not in part:
            return dict(part)
        source = part[kind]
        path = os.fspath(source) if isinstance(source, os.PathLike) else source
        return {**part, kind: self._value(path)}

    def _value(self, value: Any) -> Any:
        """Return a column's value for a file, its path checked if it will be read."""
        if isinstance(value, str):
            return self.place(value)
        if not isinstance(value, Mapping) or value.get("bytes") is not None:
            return value
        path = value.get("path")
        return {**value, "path": self.place(path)} if isinstance(path, str) else value

    def _inside(self, name: str, path: str) -> str:
        roots = (*(() if self.digested is None else (self.digested,)), *self.folders)
        near = [str(root / path) for root in roots] if not os.path.isabs(path) else []
        if not os.path.isabs(path) and not any(map(os.path.exists, (*near, path))):
            return path  # opening it will report that it does not exist
        path = next(filter(os.path.exists, near), os.path.abspath(path))
        real = Path(os.path.realpath(path))
        if self.digested is not None and _below(real, self.digested):
            parts = real.relative_to(os.path.realpath(self.digested)).parts
            if not any(part.startswith(".") for part in parts):
                return path
        if any(_below(real, root) for root in self.folders):
            return path
        raise OutsideSource(f"{name!r} in the data lies elsewhere; valid: {self._valid()}")

    def _valid(self) -> str:
        if self.digested is not None:
            return f"a file that is not hidden in benchmark.path={str(self.digested)!r}"
        return "a file in the hub's cache, or benchmark.path=<the folder that holds it>"

    def _decode(
        self,
        pixels: bool,
        decode: Callable[..., Any],
        column: Any,
        value: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Decode a value of a column with files, its path checked; with `pixels` an image as `open_image` has it."""
        if isinstance(value, str):
            value = {"path": value, "bytes": None}
        image = decode(column, self._value(value), *args, **options)
        if not pixels or not isinstance(image, PIL.Image.Image):
            return image
        if image.mode in WIDE:
            name = value.get("path") if isinstance(value, Mapping) else value
            image = in_8_bits(image, str(name or "of the data"))
        laid = self.transparency != TRANSPARENCY[0] and image.has_transparency_data
        return open_image(image, self.transparency) if laid else image

    def _open(self, opened: Callable[..., Any], fp: Any, *args: Any, **options: Any) -> Any:
        """Open an image, its path checked."""
        if isinstance(fp, str | bytes | os.PathLike):
            fp = self._inside(os.fsdecode(fp), os.fsdecode(fp))
        return opened(fp, *args, **options)

    def _file_system(
        self, make: Callable[..., Any], system: Any, *args: Any, **options: Any
    ) -> Any:
        """Make a file system; offline only one that reaches no other machine."""
        names = [system.protocol] if isinstance(system.protocol, str) else system.protocol
        if self.offline and not LOCAL.issuperset(names):
            raise DistantSource(
                f"offline=true: the data ask for {names[0]}://; valid: offline=false, or {self._valid()}"
            )
        return make(system, *args, **options)


def allowed_sources(
    data: LocalData | None, include_path: Path | None, offline: bool
) -> AllowedSources:
    """Return the files that a benchmark may open, before its task is known.

    Args:
        data: serves data sets from `benchmark.path`; None: they come from the hub.
        include_path: folder of the task.
        offline: whether connections are refused.
    """
    task_folders = [
        Path(lmms_eval.__file__).parent,
        *([] if include_path is None else [include_path]),
    ]
    if data is not None:
        digested = data.copies.digested
        # A plain copy of the hub's cache: its files are links to blobs next to the snapshots.
        blobs = digested.absolute().parent.parent / "blobs"
        linked = [blobs] if digested.absolute().parent.name == "snapshots" else []
        return AllowedSources(digested, [data.home, *linked, *task_folders], offline)
    cache = (
        # Tasks unpack videos below it, whatever the libraries read at import.
        Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser(),
        huggingface_hub.constants.HF_HOME,
        huggingface_hub.constants.HF_HUB_CACHE,
        datasets.config.HF_DATASETS_CACHE,
        datasets.config.DOWNLOADED_DATASETS_PATH,
        datasets.config.EXTRACTED_DATASETS_PATH,
    )
    return AllowedSources(None, [*map(Path, cache), *task_folders], offline)


def admit_own(borders: AllowedSources, config: TaskConfig) -> None:
    """Let the user's own tables name any file of this machine.

    These are tables that a task file names by path, without `benchmark.path`: its author can read the files, which does
    not hold for a data set that was downloaded by name.
    """
    stated = config.dataset_kwargs or {}
    named = [*texts_in(stated.get("data_files")), *texts_in(stated.get("data_dir"))]
    packaged = config.dataset_path in datasets.packaged_modules._PACKAGED_DATASETS_MODULES
    paths = named if packaged else [config.dataset_path or ""]
    local = all(SCHEME.match(name) is None for name in paths)
    if borders.digested is None and local and paths and (packaged or os.path.isdir(paths[0])):
        borders.folders.append(Path(os.sep))


def _below(real: Path, folder: Path) -> bool:
    return real.is_relative_to(os.path.realpath(folder))
