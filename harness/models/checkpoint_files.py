"""Checks of the files of a checkpoint directory: present, complete, and readable by the library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from espalier.harness.errors import FOREIGN, UserError, brief, first_words, foreign
from espalier.harness.models.families import check_format
from espalier.harness.specs.hub_cache import other_format
from espalier.harness.specs.revisions import MODEL_FILES
from espalier.harness.store.files.digests import Digests, read_bytes

INDEX = "model.safetensors.index.json"
#: Of weights in torch's format, which `espalier convert` reads.
PICKLES_INDEX = "pytorch_model.bin.index.json"

#: Files of a checkpoint that the library reads as JSON tables.
SETTINGS = frozenset(
    {
        *("config.json", "generation_config.json", INDEX),
        *(
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
        ),
        *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
        *("chat_template.json", "vocab.json"),
    }
)

#: The first bytes of a pointer of Git LFS: the content has not been fetched.
POINTER = b"version https://git-lfs"

#: Errors of a damaged weight file.
BROKEN: tuple[type[Exception], ...] = (*FOREIGN, SafetensorError)


def check_checkpoint(path: Path, digests: Digests, sibling: str | None = None) -> None:
    """Raise UserError unless `path` holds a model config, complete weight files and a tokenizer's settings.

    `sibling` is named for a release in another format (`check_format`).

    Everything that is read must be a file (reading a pipe would never end), and a settings file a table. A weight file
    is complete if its header parses and gives exactly the number of bytes that follow, and if it has the SHA-256 of
    `<file>.sha256`, where that exists. Cost: one read of files that have a checksum, headers otherwise.
    """
    with foreign(f"model.path={brief(str(path))!r} cannot be read", "a directory that can be read"):
        _check(path, digests, sibling)


def _check(path: Path, digests: Digests, sibling: str | None) -> None:
    key = f"model.path={brief(str(path))!r}"
    config = path / "config.json"
    if config.is_file() and _problem(config) is None:
        check_format(path.name, str(path), json.loads(read_bytes(config)), sibling)
    weights = sorted(path.glob("*.safetensors"))
    if not config.exists() or not weights:
        raise UserError(
            f"{key} holds no model{other_format(path)}; valid: a directory with config.json and *.safetensors"
        )
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"{key} holds a LoRA adapter (adapter_config.json) beside the weights, which the library would apply; "
            "valid: merged weights (merge_and_unload of peft) without that file"
        )
    for file in sorted(file for pattern in MODEL_FILES for file in path.glob(pattern)):
        problem = _problem(file)
        if problem is not None:
            raise UserError(f"model.path: {str(file)!r} {problem}; valid: the original file")
    if not (path / "tokenizer_config.json").exists():
        raise UserError(
            f"{key} has no tokenizer_config.json, which names the tokenizer's special tokens; "
            "valid: the original file"
        )
    check_shards(path, key)
    for file in weights:
        recorded = file.with_name(f"{file.name}.sha256")
        if recorded.is_file() and read_bytes(recorded).split()[:1] != [digests.file(file).encode()]:
            raise UserError(
                f"{key}: weight file {file.name!r} is damaged: its SHA-256 differs from {recorded.name}; "
                "valid: the original file"
            )


def check_shards(folder: Path, key: str) -> None:
    """Raise UserError unless a checkpoint's weight files are whole, and those of its index if there is one.

    Args:
        folder: the checkpoint.
        key: the start of the error line, as `model.path='./ckpt'`.

    Cost: the header of each file.
    """
    weights = sorted(folder.glob("*.safetensors"))
    for shard in weights:
        damage = _damage(shard)
        if damage is not None:
            raise UserError(
                f"{key}: weight file {shard.name!r} is damaged: {damage}; valid: the original file"
            )
    index = folder / (INDEX if weights else PICKLES_INDEX)
    if not index.is_file():
        return
    problem = f"{key}: {index.name} does not name a file for each tensor"
    with foreign(problem, "the original file", BROKEN):
        places = json.loads(read_bytes(index))["weight_map"].items()
        files = sorted({str(file) for _, file in places})
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise UserError(
            f"{key}: half a download, {len(missing)} of {len(files)} weight files are missing, the first is "
            f"{missing[0]}; valid: the same download again, which resumes"
        )
    _check_commits(folder, files, key)
    for file in files if weights else ():
        with (
            foreign(f"{key}: weight file {file} is damaged", "the original file", BROKEN),
            safe_open(folder / file, framework="pt") as tensors,
        ):
            strange = set(tensors.keys()) ^ {name for name, place in places if place == file}
        if strange:
            raise UserError(
                f"{key}: shards of two releases, {file} and {INDEX} differ in {len(strange)} tensors, the first is "
                f"{min(strange)}; valid: all files of one release"
            )


def _check_commits(folder: Path, files: Sequence[str], key: str) -> None:
    """Raise UserError for files of several commits, by the notes of `hf download --local-dir`; without notes, none.

    Neither names nor shapes differ between two releases of one architecture, and the index's total size follows from
    them. A snapshot of the hub's cache has one commit.
    """
    commits: dict[str, str] = {}
    for file in files:
        note = folder / ".cache" / "huggingface" / "download" / f"{file}.metadata"
        if note.is_file():
            commit = read_bytes(note).decode(errors="replace").partition("\n")[0]
            commits.setdefault(commit, file)
    if len(commits) > 1:
        (_, first), (_, second), *_ = commits.items()
        raise UserError(
            f"{key}: shards of two releases, {first} and {second} were downloaded from different commits; valid: the "
            "same download again, which fetches what differs"
        )


def _problem(file: Path) -> str | None:
    """Return why a file cannot be read by its name, None if it can."""
    if not file.is_file():
        return "is not a file"
    with file.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            return "is a pointer of Git LFS, its content was not fetched (git lfs pull)"
    if file.name not in SETTINGS:
        return None
    stat = file.stat()
    return _no_table(file, stat.st_size, stat.st_mtime_ns)


@cache  # a sweep checks every cell; size and time of change stand for the content
def _no_table(file: Path, size: int, changed: int) -> str | None:
    """Return the fault of a JSON file that must hold a table, None if there is none."""
    try:
        content = json.loads(read_bytes(file))
    except FOREIGN as error:
        return f"does not parse ({first_words(error)})"
    return None if isinstance(content, dict) else f"holds a {type(content).__name__}, not a table"


def _damage(file: Path) -> str | None:
    """Return the fault of a safetensors file, None if its header parses and gives the number of bytes that follow."""
    if (problem := _problem(file)) is not None:
        return problem
    try:
        with safe_open(file, framework="pt"):
            return None
    except BROKEN as error:
        return f"its header does not parse ({first_words(error)})"
