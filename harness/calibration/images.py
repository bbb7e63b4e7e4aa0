"""Images for calibration: training scenes, or a sample of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def scene_images(n_images: int, seed: int) -> Iterator[Image]:
    """Yield the first training scenes of a seed."""
    from harness.seedling.scenes import Scenes

    scenes = Scenes()
    for index in range(n_images):
        yield scenes.scene("train", seed, index).to_pil()


def folder_images(folder: Path, n_images: int, seed: int) -> Iterator[Image]:
    """Return RGB images drawn from a folder without replacement, in the order of their names.

    Raises:
        UserError: the folder is not there or holds too few images (at once), or an image does not open (on its turn).
    """
    if not folder.is_dir():
        raise UserError(f"images_dir={str(folder)!r} is not a folder")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if len(files) < n_images:
        raise UserError(f"images={n_images}: images_dir={str(folder)!r} holds {len(files)} images")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(files), generator=generator)[:n_images].sort().values
    return (_open(files[place]) for place in drawn.tolist())


def _open(path: Path) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"images_dir: {path.name!r} does not open as an image ({error})") from error
