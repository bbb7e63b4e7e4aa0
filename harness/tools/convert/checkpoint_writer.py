"""What every conversion does: open a release, compare its tensors with the model's, write the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from espalier.harness.errors import UserError, foreign, print_lines
from espalier.harness.models.build_adapter import HEAD
from espalier.harness.models.checkpoint_files import INDEX, check_shards
from espalier.harness.specs.commands import command_parser, print_error

Shape = tuple[int, ...]

#: From a name of the release and its tensor to the model's tensors; none if the model computes it, None for an unknown
#: name. Of a tensor on the meta device, it gives the shapes.
Rename = Callable[[str, Tensor], "Mapping[str, Tensor] | None"]


def split_rows(tensor: Tensor, rows: Mapping[str, int], groups: int = 1) -> dict[str, Tensor]:
    """Return the model's tensors of one that holds them along its rows; unsplit if they do not fill it.

    Args:
        tensor: (sum of rows, ...) of the release.
        rows: of each of the model's tensors by name, in their order.
        groups: how often that order repeats; every group holds an equal share of each.
    """
    if len(tensor) != sum(rows.values()):
        return {next(iter(rows)): tensor}
    parts = tensor.unflatten(0, (groups, -1)).split([n // groups for n in rows.values()], dim=1)
    # Views of one storage cannot be saved.
    return {name: part.flatten(0, 1).clone() for name, part in zip(rows, parts, strict=True)}


def lengthened(table: Tensor, rows: int) -> Tensor:
    """Return a table of tokens with `rows` rows, for placeholders; one that has more stays as it is.

    New rows are the mean of the others. As an output head, their logit is the mean of the logits, so that a greedy
    answer never takes one.
    """
    mean = table.float().mean(dim=0).to(table.dtype)
    return torch.cat([table, mean.expand(max(rows - len(table), 0), -1)])


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
            shard_shapes = {name: tuple(value.shape) for name, value in _tensors(shard, "meta")}
        twice = shapes.keys() & shard_shapes.keys()
        if twice:
            raise UserError(
                f"weight file {str(shard)!r} holds {min(twice)!r} again; valid: the files of one release"
            )
        shapes |= shard_shapes
    return shapes


def _tensors(shard: Path, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor; on the meta device, without content."""
    if shard.suffix == ".bin":
        # Files of the format before torch 1.6 cannot be mapped into memory.
        mapped = device == "cpu" and is_zipfile(shard)
        yield from torch.load(shard, map_location=device, weights_only=True, mmap=mapped).items()
        return
    with safe_open(shard, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            if device == "cpu":
                yield name, tensors.get_tensor(name)
            else:
                yield name, torch.empty(tensors.get_slice(name).get_shape(), device=device)


def check_names(
    shapes: Mapping[str, Shape],
    rename: Rename,
    expected: Mapping[str, Shape],
    optional: Collection[str] = (),
) -> None:
    """Refuse a release unless its tensors are exactly those of the model.

    Args:
        shapes: of the release, by its names.
        rename: from its tensors to the model's.
        expected: shapes of the model's tensors.
        optional: tensors of the model that may be missing (tied ones).

    Raises:
        UserError: an unknown name, another shape, a tensor that is missing.
    """
    present: set[str] = set()
    for name, shape in shapes.items():
        parts = rename(name, torch.empty(shape, device="meta"))
        if parts is None or not parts.keys() <= expected.keys():
            raise UserError(
                f"tensor {name!r} of the release is unknown to the model; nothing was written"
            )
        for part, tensor in parts.items():
            if tensor.shape != expected[part]:
                raise UserError(
                    f"tensor {name!r} of the release has shape {shape}, the model's {part!r} has {expected[part]}"
                )
        present |= parts.keys()
    missing = sorted(set(expected) - present - set(optional))
    if missing:
        raise UserError(
            f"the release lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}"
        )


#: Called with lines of progress.
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
    with foreign(f"{str(source)!r}: no usable config.json", "the original file"):
        config = dict(json.loads((source / "config.json").read_text(encoding="utf-8")))
    return Release(source, config, shards, shapes)


def check_tokens(count: int, rows: int) -> None:
    """Raise UserError unless the embedding has a row for each of `count` tokens."""
    if count > rows:
        raise UserError(f"the tokenizer has {count} tokens, the release's embedding {rows} rows")


def write_checkpoint(
    release: Release,
    target: Path,
    say: Say,
    *,
    model_class: Any,
    config: Any,
    processor: Any,
    generation: GenerationConfig,
    rename: Rename,
    shards: Sequence[Path] = (),
) -> None:
    """Write the checkpoint of a release, file by file, after a comparison of all names and shapes.

    Args:
        release: the release.
        target: directory to write, new or empty.
        say: called with progress lines.
        model_class: the class of the model.
        config: its configuration.
        processor: a processor, or a tokenizer where there is none.
        generation: its special tokens.
        rename: from tensors of the release to the model's.
        shards: weight files beside the release's, of a tower that it lacks.

    Cost: memory of one shard; data types stay.

    Raises:
        UserError: unknown, missing or differently shaped tensors.
    """
    with torch.device("meta"):
        model = model_class(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    shapes = {**release.shapes, **shapes_of(shards)}
    check_names(shapes, rename, expected, (HEAD,) if config.tie_word_embeddings else ())
    target.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    size, sources = 0, [*release.shards, *shards]
    for number, shard in enumerate(sources, 1):
        renamed: dict[str, Tensor] = {}
        for name, tensor in _tensors(shard):
            renamed |= rename(name, tensor) or {}
        file = f"model-{number:05d}-of-{len(sources):05d}.safetensors"
        contents = {name: tensor.contiguous() for name, tensor in renamed.items()}
        save_file(contents, target / file, metadata={"format": "pt"})
        files |= dict.fromkeys(renamed, file)
        size += sum(tensor.nbytes for tensor in renamed.values())
        say(f"{number}/{len(sources)} {shard.name} -> {file}: {len(renamed)} tensors")
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (target / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True), encoding="utf-8")
    config.architectures = [model_class.__name__]
    for part in (config, processor, generation):
        part.save_pretrained(target)
    say(f"done: {len(shapes)} tensors in {target}; use it with model.path={target}")


def command_line(
    name: str, about: str | None, convert: Callable[..., None], *examples: str, **folders: str
) -> Callable[[Sequence[str] | None], int]:
    """Return the function that runs the command line of a conversion, and returns the exit status.

    Args:
        name: of the release's format.
        about: its purpose.
        convert: gets the release, the output directory, further folders and where lines of progress go.
        *examples: arguments after the name.
        **folders: help for each further folder.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        parser = command_parser(f"convert {name}", about, *examples)
        for folder, words in folders.items():
            parser.add_argument(f"--{folder}", type=Path, metavar="FOLDER", help=words)
        parser.add_argument("source", type=Path, metavar="release")
        parser.add_argument("target", type=Path, metavar="output")
        options = vars(parser.parse_args(arguments))
        try:
            convert(**options, say=print_lines)
        except UserError as error:
            return print_error(error, 2)
        return 0

    return main
