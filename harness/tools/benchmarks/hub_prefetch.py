"""Everything that a benchmark takes from the network: fetched once, unpacked, and looked at without the network.

Archives of media are unpacked where lmms-eval's tasks look for them; an interrupted download continues.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from zipfile import ZipFile

from huggingface_hub import constants

from espalier.harness.config.build_spec import specs_of
from espalier.harness.errors import UserError, print_lines
from espalier.harness.evaluation.hub_data import data_sets
from espalier.harness.paths import child_path
from espalier.harness.specs.hub_cache import online
from espalier.harness.specs.hub_files import (
    SilentBar,
    Wanted,
    download,
    free,
    in_one_line,
    settled,
    size_text,
)
from espalier.harness.specs.revisions import MODEL_FILES
from espalier.harness.specs.run_spec import ModelSpec, RunSpec

#: Tables are downloaded and then prepared, archives downloaded and then unpacked: twice the space.
TWICE = 2

#: A piece of an archive that was cut for the upload: `videos.tar.part.aa`, `videos_1.tar`.
TAR = re.compile(r"^(?P<stem>.+?)(_\d+)?\.tar(\..+)?$")


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


def prefetch(name: str, overrides: Sequence[str] = ()) -> int:
    """Download what a benchmark needs, then check it in a process without network; return its exit code.

    Args:
        name: as after `benchmark=`.
        overrides: of a run; `model=<name>` fetches that model's checkpoint too.

    Raises:
        UserError: one line: no such benchmark, the hub refuses or cannot be reached, or the disk is too full.
    """
    spec = specs_of(f"benchmark={name}", "method=none", "offline=false", *overrides)[0]
    with online():
        return _prefetch(name, spec, overrides)


def _prefetch(name: str, spec: RunSpec, overrides: Sequence[str]) -> int:
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
        with in_one_line(part):
            settled_parts.append(settled(part))
            files = download(settled_parts[-1], dry_run=True, tqdm_class=SilentBar)
        missing = [file for file in files if file.will_download]
        size = sum(file.file_size or 0 for file in missing)
        need += size if part.kind == "model" or part.link else TWICE * size
        print_lines(f"{part.name}: {len(missing)} files to download, {size_text(size)}")
    n_free = free(home)
    print_lines(f"disk: at most {size_text(need)} needed, {size_text(n_free)} free")
    if need > n_free:
        raise UserError(
            f"HF_HOME={str(home)!r}: {size_text(need)} may be needed (data sets count twice: downloaded, and "
            f"prepared or unpacked), {size_text(n_free)} are free; valid: a folder with that much room"
        )
    for part in settled_parts:
        with in_one_line(part):
            _fetch(part, home)
    if any(part.kind == "dataset" for part in wanted):
        _prepare(spec)
    print_lines(f"{name}: everything is here; checking it without the network")
    return _verify(name, overrides)


def _fetch(wanted: Wanted, home: Path) -> None:
    """Download the missing files of one repository, and put its media where tasks look for them."""
    folder = Path(download(wanted))
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
    with in_one_line(dataset):
        open_benchmark(spec)


def _verify(name: str, overrides: Sequence[str]) -> int:
    line = [sys.executable, "-P", "-m", "espalier", "benchmarks", "check", name, *overrides]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return subprocess.run(line, env=os.environ | child_path() | offline, check=False).returncode


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
