"""Files of repositories of the Hugging Face hub: which are wanted, how they are fetched, and what stops it."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from shutil import disk_usage
from tarfile import TarError
from threading import Thread
from typing import Any
from zipfile import BadZipFile

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from espalier.harness.errors import UserError, print_lines
from espalier.harness.ranks import is_main_process
from espalier.harness.specs.hub_cache import online
from espalier.harness.specs.revisions import MODEL_FILES

#: Seconds in which the hub has to answer a first request.
PATIENCE = 3


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


def settled(wanted: Wanted) -> Wanted:
    """Return the needed part of a data set, with the files of its configuration by name; others are not downloaded.

    Tasks load a configuration with all its splits, so these count too. Cost: a few requests to the hub.
    """
    # Whoever may not see the repository, or cannot reach it, learns it here.
    reach(wanted)
    if wanted.kind != "dataset" or wanted.unpack is not None:
        return wanted
    # The library takes seconds to import.
    import datasets

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


def download(wanted: Wanted, **options: Any) -> Any:
    """Return the folder of `snapshot_download`, or what `dry_run=True` lists, for the files that are wanted."""
    return snapshot_download(
        wanted.name,
        repo_type=wanted.kind,
        revision=wanted.revision,
        allow_patterns=None if wanted.patterns is None else list(wanted.patterns),
        **options,
    )


def checkpoint_folder(hub: str, revision: str | None) -> Path:
    """Return the folder of a checkpoint in the local cache; what it lacks is downloaded first.

    Raises:
        UserError: the hub refuses or cannot be reached, or the disk is too full.
    """
    wanted = Wanted(hub, "model", revision, MODEL_FILES)
    # It knows what is missing of its own downloads, not of those of other programs.
    with suppress(LocalEntryNotFoundError):
        folder = Path(download(wanted, local_files_only=True))
        index = folder / "model.safetensors.index.json"
        names = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ()
        if any(folder.glob("*.safetensors")) and all((folder / name).exists() for name in names):
            return folder
    return fetch(wanted)


def fetch(wanted: Wanted) -> Path:
    """Download the missing files of a repository, once their size and place are printed; return their folder.

    Raises:
        UserError: the hub refuses or cannot be reached, or the disk is too full.
    """
    cache = Path(constants.HF_HUB_CACHE)
    with online(), in_one_line(wanted):
        wanted = settled(wanted)
        files = download(wanted, dry_run=True, tqdm_class=SilentBar)
        sizes = [file.file_size or 0 for file in files if file.will_download]
        need, n_free = sum(sizes), free(cache)
        if need > n_free:
            raise UserError(
                f"{wanted.kind} {wanted.name}: {size_text(need)} to download, {size_text(n_free)} are free in {cache}; "
                "valid: HF_HOME=<a folder with that much room>"
            )
        if sizes and is_main_process():
            print_lines(
                f"downloading {wanted.name}: {len(sizes)} files, {size_text(need)}, to {cache}",
                file=sys.stderr,
            )
        return Path(download(wanted, **{} if is_main_process() else {"tqdm_class": SilentBar}))


def reach(wanted: Wanted) -> None:
    """Ask the hub for a repository.

    Raises:
        UserError: the hub refuses, or does not answer within PATIENCE seconds.
    """
    answers: SimpleQueue[Exception | None] = SimpleQueue()

    def ask() -> None:
        try:
            HfApi().repo_info(
                wanted.name, repo_type=wanted.kind, revision=wanted.revision, timeout=PATIENCE
            )
        except EXPECTED as error:  # raised below
            answers.put(error)
        else:
            answers.put(None)

    with online(), in_one_line(wanted):
        # The time that a name server takes has no limit elsewhere.
        Thread(target=ask, daemon=True).start()
        try:
            error = answers.get(timeout=PATIENCE)
        except Empty:
            error = LocalEntryNotFoundError(f"no answer within {PATIENCE} s")
        if error is not None:
            raise error


class SilentBar(tqdm):
    """A silent progress bar: listing takes seconds, and only downloads need a bar."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})


#: What the hub's library raises if the network fails: of the HTTP library that it is built on, whichever that is.
NETWORK: type[Exception] = HfHubHTTPError.__bases__[0]

#: Errors of the network and the disk, and words of the line after the repository's name; the first that fits.
REASONS: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    (
        (GatedRepoError,),
        " is gated: accept its terms at {url}, then log in (`hf auth login`, or set HF_TOKEN)",
    ),
    ((RevisionNotFoundError,), " has no revision {revision!r}"),
    ((RepositoryNotFoundError,), " is not on {hub}, or private"),
    ((HfHubHTTPError,), ": the hub refuses: {reason}"),
    (
        (OfflineModeIsEnabled, LocalEntryNotFoundError, NETWORK),
        ": {hub} cannot be reached ({reason}); valid: a network, and HF_HUB_OFFLINE unset, or {place}, or its copy in "
        "{cache} from another machine",
    ),
    ((BadZipFile, TarError), ": a damaged archive: {reason}"),
    ((OSError,), ": {reason}"),
)


#: All of them.
EXPECTED = tuple(chain(*(kinds for kinds, _ in REASONS)))


@contextmanager
def in_one_line(wanted: Wanted) -> Iterator[None]:
    """Turn errors of the network and the disk into one line."""
    try:
        try:
            yield
        except DryRunError as error:
            raise error.__cause__ or error from error
    except EXPECTED as error:
        words = next(words for kinds, words in REASONS if isinstance(error, kinds))
        if getattr(error, "errno", None) == errno.ENOSPC:
            words = (
                ": the disk is full; what is downloaded stays, the same command goes on from there"
            )
        hub, kind = constants.ENDPOINT, wanted.kind
        line = words.format(
            url=f"{hub}/{'datasets/' if kind == 'dataset' else ''}{wanted.name}",
            hub=hub,
            cache=constants.HF_HUB_CACHE,
            place="model.path=<directory>"
            if kind == "model"
            else "benchmark.path=<a folder with a copy>",
            revision=wanted.revision,
            reason=next(iter(str(error).splitlines()), type(error).__name__),
        )
        start = f"model.hub={wanted.name!r}" if kind == "model" else f"dataset {wanted.name}"
        raise UserError(f"{start}{line}") from error


def size_text(count: float) -> str:
    """Return bytes in the unit that people read, as the hub does: of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def free(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return disk_usage(existing).free
