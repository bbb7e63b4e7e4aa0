"""Renaming the tensors of a checkpoint shard by shard, so that one shard at a time is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from harness.errors import UserError

Shape = tuple[int, ...]


def shards_of(folder: Path) -> list[Path]:
    """Return a release's safetensors files in order.

    Raises:
        UserError: there are none.
    """
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise UserError(
            f"{str(folder)!r} holds no *.safetensors; give the directory of the release"
        )
    return found


def shapes_of(shards: Sequence[Path]) -> dict[str, Shape]:
    """Return name and shape of every tensor; only headers are read."""
    found: dict[str, Shape] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                found[name] = tuple(tensors.get_slice(name).get_shape())
    return found


def check_names(
    shapes: Mapping[str, Shape],
    rename: Callable[[str], str | None],
    expected: Mapping[str, Shape],
    optional: Collection[str] = (),
) -> None:
    """Refuse a release whose tensors are not exactly those of the model.

    Args:
        shapes: of the release, by its names.
        rename: from its names to the model's, None for what it does not know.
        expected: shapes of the model's tensors.
        optional: tensors of the model that may be missing (tied ones).

    Raises:
        UserError: an unknown name, another shape, a tensor that is missing.
    """
    found: set[str] = set()
    for name, shape in shapes.items():
        target = rename(name)
        if target is None or target not in expected:
            raise UserError(
                f"tensor {name!r} of the release is unknown to the model; nothing was written"
            )
        if shape != expected[target]:
            raise UserError(
                f"tensor {name!r} of the release has shape {shape}, the model's {target!r} has {expected[target]}"
            )
        found.add(target)
    missing = sorted(set(expected) - found - set(optional))
    if missing:
        raise UserError(
            f"the release lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}"
        )


def rewrite(
    shards: Sequence[Path],
    rename: Callable[[str], str | None],
    folder: Path,
    say: Callable[[str], None],
) -> None:
    """Write every shard under the model's names, and the index that transformers reads.

    Args:
        shards: of the release, already checked.
        rename: from its names to the model's.
        folder: where to write; it exists.
        say: told after each shard.

    Cost: memory of one shard; data types stay.
    """
    files: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, 1):
        with safe_open(shard, framework="pt") as tensors:
            renamed = {
                str(rename(name)): tensors.get_tensor(name)
                for name in tensors.keys()  # noqa: SIM118 - not a mapping
            }
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(renamed, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(renamed, file)
        size += sum(tensor.nbytes for tensor in renamed.values())
        say(f"{number}/{len(shards)} {shard.name} -> {file}: {len(renamed)} tensors")
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1, sort_keys=True)
    )
