"""Files that the data of a run may name: in their own folder or the hub's cache, and not addresses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import lmms_eval
import PIL.Image
from lmms_eval.api.task import TaskConfig

from espalier.harness.errors import UserError
from espalier.harness.evaluation.local_data import LocalData
from espalier.harness.evaluation.upstream import column_decoded, file_system_made, image_opened
from espalier.harness.media.images import TRANSPARENCY, WIDE, in_8_bits, open_image

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
                read = self._pixels if pixels and column is datasets.Image else self._decode
                stack.enter_context(column_decoded(column, read))
            stack.enter_context(image_opened(self._open))
            stack.enter_context(file_system_made(self._file_system))
            yield

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        source = None if part["type"] == "text" else part.get(part["type"])
        if isinstance(source, str | os.PathLike):
            return {**part, part["type"]: self.place(os.fspath(source))}
        if isinstance(source, Mapping):
            return {**part, part["type"]: self._value(source)}
        return dict(part)

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
        self, decode: Callable[..., Any], column: Any, value: Any, *args: Any, **options: Any
    ) -> Any:
        """Decode a value of a column with files, its path checked."""
        if isinstance(value, str):
            value = {"path": value, "bytes": None}
        return decode(column, self._value(value), *args, **options)

    def _pixels(
        self, decode: Callable[..., Any], column: Any, value: Any, *args: Any, **options: Any
    ) -> Any:
        """Decode a value of an image column as `open_image` has it."""
        image = self._decode(decode, column, value, *args, **options)
        if not isinstance(image, PIL.Image.Image):
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
            raise OutsideSource(
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
    named = [*_strings(stated.get("data_files")), *_strings(stated.get("data_dir"))]
    packaged = config.dataset_path in datasets.packaged_modules._PACKAGED_DATASETS_MODULES
    paths = named if packaged else [config.dataset_path or ""]
    local = all(SCHEME.match(name) is None for name in paths)
    if borders.digested is None and local and paths and (packaged or os.path.isdir(paths[0])):
        borders.folders.append(Path(os.sep))


def _strings(stated: Any) -> list[str]:
    if isinstance(stated, str):
        return [stated]
    values = stated.values() if isinstance(stated, Mapping) else stated or ()
    return [name for value in values for name in _strings(value)]


def _below(real: Path, folder: Path) -> bool:
    return real.is_relative_to(os.path.realpath(folder))
