"""What every conversion does: open a release, compare its tensors with the model's, write the checkpoint."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from espalier.harness.errors import FOREIGN, UserError, foreign, print_lines
from espalier.harness.models.checkpoint_files import check_shards

Shape = tuple[int, ...]


class Parts(Protocol):
    """The tensors of the model that one tensor of the release becomes."""

    @property
    def names(self) -> Collection[str]:
        """The model's names."""

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the model's tensors."""

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the shapes of the model's tensors in one of `shape`; empty if they do not fill it."""


@dataclass(frozen=True)
class Fused:
    """A tensor of the release that holds several of the model's, one after another along its rows.

    Attributes:
        rows: of each of the model's tensors by name, in their order.
        groups: how often that order repeats; every group holds an equal share of each.
    """

    rows: Mapping[str, int]
    groups: int = 1

    @property
    def names(self) -> Collection[str]:
        """The model's names."""
        return list(self.rows)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the model's tensors of (sum of rows, ...)."""
        grouped = tensor.unflatten(0, (self.groups, -1))
        parts = grouped.split([n // self.groups for n in self.rows.values()], dim=1)
        # Views of one storage cannot be saved.
        return {
            name: part.flatten(0, 1).clone() for name, part in zip(self.rows, parts, strict=True)
        }

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the shapes of the model's tensors in one of `shape`; empty if they do not fill it."""
        if shape[:1] != (sum(self.rows.values()),):
            return {}
        return {name: (rows, *shape[1:]) for name, rows in self.rows.items()}


@dataclass(frozen=True)
class Lengthened:
    """A table of tokens that has more rows in the model, for placeholders.

    New rows are the mean of the others. As an output head, their logit is the mean of the logits, so that a greedy
    answer never takes one.
    """

    name: str
    rows: int

    @property
    def names(self) -> Collection[str]:
        """The model's name."""
        return [self.name]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the table with its new rows."""
        mean = tensor.float().mean(dim=0).to(tensor.dtype)
        new = mean.expand(self.rows - len(tensor), -1)
        return {self.name: torch.cat([tensor, new])}

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the shape with all rows; empty if the release has more."""
        return {self.name: (self.rows, *shape[1:])} if shape[0] <= self.rows else {}


@dataclass(frozen=True)
class Unused:
    """A tensor of the release that the model computes itself, or does not have."""

    names: Collection[str] = ()

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return nothing."""
        del tensor
        return {}

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return nothing."""
        del shape
        return {}


#: From a name of the release to the model's, None for an unknown one.
Rename = Callable[[str], "str | Parts | None"]


def shards_of(folder: Path) -> list[Path]:
    """Return a release's weight files in order: safetensors, else PyTorch's.

    Raises:
        UserError: there are none.
    """
    paths = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise UserError(
            f"{str(folder)!r} holds no *.safetensors and no pytorch_model*.bin; give the directory of the release"
        )
    return paths


def shapes_of(shards: Sequence[Path]) -> dict[str, Shape]:
    """Return name and shape of every tensor; only headers are read.

    Raises:
        UserError: a file is damaged, or a tensor is in two of them.
    """
    shapes: dict[str, Shape] = {}
    for shard in shards:
        problem = f"weight file {str(shard)!r} is damaged"
        with foreign(
            problem, "the original file", (SafetensorError, RuntimeError, UnpicklingError)
        ):
            shard_shapes = dict(_shapes(shard))
        twice = shapes.keys() & shard_shapes.keys()
        if twice:
            raise UserError(
                f"weight file {str(shard)!r} holds {min(twice)!r} again; valid: the files of one release"
            )
        shapes |= shard_shapes
    return shapes


def _shapes(shard: Path) -> Iterator[tuple[str, Shape]]:
    if shard.suffix == ".bin":
        for name, tensor in torch.load(shard, map_location="meta", weights_only=True).items():
            yield name, tuple(tensor.shape)
        return
    with safe_open(shard, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            yield name, tuple(tensors.get_slice(name).get_shape())


def _tensors(shard: Path) -> Iterator[tuple[str, Tensor]]:
    if shard.suffix == ".bin":
        # Files of the format before torch 1.6 cannot be mapped into memory.
        mapped = is_zipfile(shard)
        table: dict[str, Any] = torch.load(
            shard, map_location="cpu", weights_only=True, mmap=mapped
        )
        yield from table.items()
        return
    with safe_open(shard, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            yield name, tensors.get_tensor(name)


def check_names(
    shapes: Mapping[str, Shape],
    rename: Rename,
    expected: Mapping[str, Shape],
    optional: Collection[str] = (),
) -> None:
    """Refuse a release unless its tensors are exactly those of the model.

    Args:
        shapes: of the release, by its names.
        rename: from its names to the model's, None for unknown names.
        expected: shapes of the model's tensors.
        optional: tensors of the model that may be missing (tied ones).

    Raises:
        UserError: an unknown name, another shape, a tensor that is missing.
    """
    present: set[str] = set()
    for name, shape in shapes.items():
        target = rename(name)
        names = [target] if isinstance(target, str) else target.names if target else []
        if target is None or any(part not in expected for part in names):
            raise UserError(
                f"tensor {name!r} of the release is unknown to the model; nothing was written"
            )
        target_shapes = {target: shape} if isinstance(target, str) else target.shapes(shape)
        for part in names:
            if target_shapes.get(part) != expected[part]:
                raise UserError(
                    f"tensor {name!r} of the release has shape {shape}, the model's {part!r} has {expected[part]}"
                )
            present.add(part)
    missing = sorted(set(expected) - present - set(optional))
    if missing:
        raise UserError(
            f"the release lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}"
        )


def rewrite(
    shards: Sequence[Path], rename: Rename, folder: Path, say: Callable[[str], None]
) -> None:
    """Write every shard under the model's names, and the index that transformers reads.

    Args:
        shards: of the release, already checked.
        rename: from its names to the model's.
        folder: where to write; it exists.
        say: called after each shard.

    Cost: memory of one shard; data types stay.
    """
    files: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, 1):
        renamed: dict[str, Tensor] = {}
        for name, tensor in _tensors(shard):
            target = rename(name)
            renamed |= (
                {str(target): tensor.contiguous()}
                if target is None or isinstance(target, str)
                else target.split(tensor)
            )
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(renamed, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(renamed, file)
        size += sum(tensor.nbytes for tensor in renamed.values())
        say(f"{number}/{len(shards)} {shard.name} -> {file}: {len(renamed)} tensors")
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1, sort_keys=True), encoding="utf-8"
    )


Say = Callable[[str], None]


@dataclass(frozen=True)
class Release:
    """A release as found on disk.

    Attributes:
        folder: its directory.
        config: content of its config.json.
        shards: its weight files.
        shapes: of its tensors, by its names.
    """

    folder: Path
    config: Mapping[str, Any]
    shards: Sequence[Path]
    shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class Checkpoint:
    """What is written.

    Attributes:
        model_class: the class of the model.
        config: its configuration.
        processor: a processor, or a tokenizer where there is none.
        generation: its special tokens.
        rename: from names of the release to the model's.
        optional: tensors of the model that the release may lack (tied ones).
    """

    model_class: Any
    config: Any
    processor: Any
    generation: GenerationConfig
    rename: Rename
    optional: Collection[str] = ()


def open_release(source: Path, target: Path) -> Release:
    """Return the release in a directory; only headers of weight files are read.

    Raises:
        UserError: it has no usable config.json or no weights, or `target` is in use.
    """
    with foreign(f"output={str(target)!r} cannot be written", "a new directory"):
        if target.exists() and any(target.iterdir()):
            raise UserError(f"{str(target)!r} is not empty; give a new directory")
    shards = shards_of(source)
    check_shards(source, f"the release {str(source)!r}")
    shapes = shapes_of(shards)
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except FOREIGN as error:
        raise UserError(f"{str(source)!r}: no usable config.json ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{str(source)!r}: no usable config.json (it is not a table)")
    return Release(source, config, shards, shapes)


def require_settings(config: Mapping[str, Any], valid: Mapping[str, Any]) -> None:
    """Refuse a release that the library's modules would compute differently; keys may be absent.

    Raises:
        UserError: a value of config.json differs; the line names the first key.
    """
    for key, value in valid.items():
        if config.get(key, value) != value:
            raise UserError(
                f"config.json: {key}={config[key]!r} cannot be converted; valid: {value!r}"
            )


def check_tokens(count: int, rows: int) -> None:
    """Raise UserError unless the embedding has a row for each of `count` tokens."""
    if count > rows:
        raise UserError(f"the tokenizer has {count} tokens, the release's embedding {rows} rows")


def write_checkpoint(
    release: Release, checkpoint: Checkpoint, target: Path, say: Say, shards: Sequence[Path] = ()
) -> None:
    """Write the checkpoint of a release, after a comparison of all names and shapes.

    Args:
        release: the release.
        checkpoint: what is written.
        target: directory to write, new or empty.
        say: called with progress lines.
        shards: weight files beside the release's, of a tower that it lacks.

    Raises:
        UserError: unknown, missing or differently shaped tensors.
    """
    config = checkpoint.config
    with torch.device("meta"):
        model = checkpoint.model_class(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    shapes = {**release.shapes, **shapes_of(shards)}
    check_names(shapes, checkpoint.rename, expected, checkpoint.optional)
    target.mkdir(parents=True, exist_ok=True)
    rewrite([*release.shards, *shards], checkpoint.rename, target, say)
    config.architectures = [checkpoint.model_class.__name__]
    config.save_pretrained(target)
    checkpoint.processor.save_pretrained(target)
    checkpoint.generation.save_pretrained(target)
    say(f"done: {len(shapes)} tensors in {target}; use it with model.path={target}")


def run_conversion(
    parser: ArgumentParser, convert: Callable[..., None], arguments: Sequence[str] | None
) -> int:
    """Run the command line of a conversion, with its release and output directory; return the exit status."""
    parser.add_argument("source", type=Path, metavar="release")
    parser.add_argument("target", type=Path, metavar="output")
    options = vars(parser.parse_args(arguments))
    try:
        convert(**options, say=print_lines)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
