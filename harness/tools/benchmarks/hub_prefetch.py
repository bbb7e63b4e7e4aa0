"""Everything that a benchmark takes from the network: fetched once, unpacked, and looked at without the network.

Archives of media are unpacked where lmms-eval's tasks look for them; an interrupted download continues.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path
from shutil import disk_usage
from subprocess import PIPE, Popen
from tarfile import TarError
from typing import Any
from zipfile import BadZipFile, ZipFile

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

from espalier.harness.config.build_spec import specs_of
from espalier.harness.errors import UserError, print_lines
from espalier.harness.paths import child_path
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.revisions import MODEL_FILES
from espalier.harness.specs.run_spec import ModelSpec, RunSpec


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


def _download(wanted: Wanted, **options: Any) -> Any:
    return snapshot_download(
        wanted.name,
        repo_type=wanted.kind,
        revision=wanted.revision,
        allow_patterns=None if wanted.patterns is None else list(wanted.patterns),
        **options,
    )


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
        ": {hub} cannot be reached ({reason}); valid: a network, and HF_HUB_OFFLINE unset",
    ),
    ((BadZipFile, TarError), ": a damaged archive: {reason}"),
    ((OSError,), ": {reason}"),
)

#: Tables are downloaded and then prepared, archives downloaded and then unpacked: twice the space.
TWICE = 2

#: A piece of an archive that was cut for the upload: `videos.tar.part.aa`, `videos_1.tar`.
TAR = re.compile(r"^(?P<stem>.+?)(_\d+)?\.tar(\..+)?$")


def prefetch(name: str, overrides: Sequence[str] = ()) -> int:
    """Download what a benchmark needs, then check it in a process without network; return its exit code.

    Args:
        name: as after `benchmark=`.
        overrides: of a run; `model=<name>` fetches that model's checkpoint too.

    Raises:
        UserError: one line: no such benchmark, the hub refuses or cannot be reached, or the disk is too full.
    """
    spec = specs_of(f"benchmark={name}", "method=none", "offline=false", *overrides)[0]
    home = Path(constants.HF_HOME).expanduser()
    how = "as set" if "HF_HOME" in os.environ else "the default; set HF_HOME for another place"
    print_lines(f"HF_HOME={home} ({how})")
    wanted = [*data_sets(spec.benchmark)]
    if any(part.startswith("model=") for part in overrides):
        wanted.append(checkpoint(spec.model))
    if not wanted:
        print_lines(f"{name}: its data are on this machine, nothing is downloaded")
    need, settled_parts = 0.0, []
    for part in wanted:
        with _in_one_line(part):
            settled_parts.append(settled(part))
            files = _download(settled_parts[-1], dry_run=True, tqdm_class=_Silent)
        missing = [file for file in files if file.will_download]
        size = sum(file.file_size or 0 for file in missing)
        need += size if part.kind == "model" or part.link else TWICE * size
        print_lines(f"{part.name}: {len(missing)} files to download, {_size(size)}")
    n_free = free(home)
    print_lines(f"disk: at most {_size(need)} needed, {_size(n_free)} free")
    if need > n_free:
        raise UserError(
            f"HF_HOME={str(home)!r}: {_size(need)} may be needed (data sets count twice: downloaded, and "
            f"prepared or unpacked), {_size(n_free)} are free; valid: a folder with that much room"
        )
    for part in settled_parts:
        with _in_one_line(part):
            _fetch(part, home)
    if any(part.kind == "dataset" for part in wanted):
        _prepare(spec)
    print_lines(f"{name}: everything is here; checking it without the network")
    return _verify(name, overrides)


def _fetch(wanted: Wanted, home: Path) -> None:
    """Download the missing files of one repository, and put its media where tasks look for them."""
    folder = Path(_download(wanted))
    if wanted.unpack is None:
        return
    target = home / os.path.expanduser(os.path.expandvars(wanted.unpack))
    if not wanted.link:
        unpack(folder, target, print_lines)
    elif target.is_symlink() or not target.exists():
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(folder)
    print_lines(f"{wanted.name}: media in {target}")


def _prepare(spec: RunSpec) -> None:
    """Open the benchmark once with the network: tables are prepared, and what functions of its task want is fetched."""
    # lmms-eval takes seconds to import.
    from espalier.harness.evaluation.evaluate import open_benchmark

    dataset = Wanted(spec.benchmark.dataset.path or spec.benchmark.task)
    with _in_one_line(dataset):
        open_benchmark(spec)


def _verify(name: str, overrides: Sequence[str]) -> int:
    line = [sys.executable, "-P", "-m", "espalier", "benchmarks", "check", name, *overrides]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return subprocess.run(line, env=os.environ | child_path() | offline, check=False).returncode


@contextmanager
def _in_one_line(wanted: Wanted) -> Iterator[None]:
    """Turn errors of the network and the disk into one line."""
    try:
        try:
            yield
        except DryRunError as error:
            raise error.__cause__ or error from error
    except tuple(chain(*(kinds for kinds, _ in REASONS))) as error:
        words = next(words for kinds, words in REASONS if isinstance(error, kinds))
        if getattr(error, "errno", None) == errno.ENOSPC:
            words = (
                ": the disk is full; what is downloaded stays, the same command goes on from there"
            )
        hub, kind = constants.ENDPOINT, wanted.kind
        line = words.format(
            url=f"{hub}/{'datasets/' if kind == 'dataset' else ''}{wanted.name}",
            hub=hub,
            revision=wanted.revision,
            reason=next(iter(str(error).splitlines()), type(error).__name__),
        )
        raise UserError(f"{kind} {wanted.name}{line}") from error


def _size(count: float) -> str:
    """Return bytes in the unit that people read, as the hub does: of 1000."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def archives(folder: Path) -> list[list[Path]]:
    """Return the archives below a folder, each as its pieces in order: zip files, and tar files cut or whole."""
    groups = [[path] for path in sorted(folder.rglob("*.zip"))]
    pieces = defaultdict(list)
    for path in sorted(folder.rglob("*.tar*")):
        match = TAR.match(path.name)
        if match is not None and path.is_file():
            # `x.tar.gz` is no piece of `x.tar`.
            cut = ".part" in path.name or match[2] is not None
            pieces[path.parent / (match["stem"] if cut else path.name)].append(path)
    return groups + list(pieces.values())


def unpack(folder: Path, target: Path, tell: Callable[[str], None]) -> None:
    """Unpack every archive below a folder into another, which appears under its name only when all is there.

    lmms-eval takes an existing folder for complete. So the files are unpacked in `<target>.partial`. Members outside of
    the folder are not written.

    Raises:
        OSError, BadZipFile, TarError: the disk is full, or an archive is damaged.
    """
    if target.exists():
        return
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    groups = archives(folder)
    for number, pieces in enumerate(groups, 1):
        tell(f"unpacking {pieces[0].name} ({number} of {len(groups)}) into {partial}")
        if pieces[0].suffix == ".zip":
            with ZipFile(pieces[0]) as members:
                members.extractall(partial)
            continue
        # Pieces of 100 GB are read one after the other, never joined on the disk.
        with (
            Popen(["cat", *pieces], stdout=PIPE) as joined,
            tarfile.open(fileobj=joined.stdout, mode="r|*") as archive,
        ):
            archive.extractall(partial, filter="data")
    partial.rename(target)


def free(folder: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return disk_usage(existing).free
