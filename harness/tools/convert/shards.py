"""Renaming and splitting the tensors of a checkpoint shard by shard, so that one shard at a time is in memory."""

from __future__ import annotations

import json
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

from espalier.harness.errors import UserError, foreign

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
