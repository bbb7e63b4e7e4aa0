"""What every conversion does: open a release, compare its tensors with the model's, write the checkpoint."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from espalier.harness.errors import FOREIGN, UserError, foreign, print_lines
from espalier.harness.models.checkpoint_files import check_shards
from espalier.harness.tools.convert.shards import (
    Rename,
    Shape,
    check_names,
    rewrite,
    shapes_of,
    shards_of,
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
