"""Repositories of the hub as folders: parquet files with the hub's columns, and the card that names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures
from PIL import ImageDraw

TEXT = Value("string")
TEXTS = List(TEXT)
PICTURE = Image()
WHOLE = Value("int64")

#: Writes a data set below a folder.
Writer = Callable[[Path], None]


def picture(number: int = 0, size: tuple[int, int] = (96, 96)) -> Pictures.Image:
    """Return a small picture; another number gives another one."""
    image = Pictures.new("RGB", size, (40 * number % 256, 90, 160))
    ImageDraw.Draw(image).rectangle((10, 10, 40 + number % 40, 60), fill=(250, 220, 30))
    return image


def write_split(file: Path, columns: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one parquet file, pictures inside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = {name: [row[name] for row in rows] for name in columns}
    Dataset.from_dict(table, features=Features(dict(columns))).to_parquet(file)


def write_card(folder: Path, configs: Mapping[str, Mapping[str, str]]) -> None:
    """Write the card that says which files are which split of which configuration: {config: {split: pattern}}."""
    listing = [
        {
            "config_name": name,
            "data_files": [{"split": split, "path": path} for split, path in splits.items()],
        }
        for name, splits in configs.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listing})}---\n")


def write_repository(
    root: Path,
    name: str,
    split: str,
    columns: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    config: str | None = None,
) -> None:
    """Write a repository of one configuration and one split, as `push_to_hub` lays it out.

    Args:
        root: the folder of all repositories.
        name: `<owner>/<name>`.
        split: name of the split.
        columns: name and type of each column.
        rows: the samples.
        config: name of the configuration, the folder of its files; None: the default one, in `data`.
    """
    place = config or "data"
    write_split(root / name / place / f"{split}-00000-of-00001.parquet", columns, rows)
    write_card(root / name, {config or "default": {split: f"{place}/{split}-*"}})
