"""Images for calibration: training scenes, or a sample of a folder; and the question about each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.media.images import open_image
from espalier.harness.seedling.scenes import Scenes

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass
class ImageDigest:
    """The number of images of a calibration, and a hash of their pixels."""

    n_images: int = 0
    pixels: hashlib._Hash = field(default_factory=hashlib.sha256)

    def see(self, image: Image.Image) -> None:
        """Count an image and add its size and pixels to the hash."""
        self.n_images += 1
        self.pixels.update(f"{image.width}x{image.height}".encode())
        self.pixels.update(image.convert("RGB").tobytes())


def question(image: Image.Image, prompt: str) -> list[dict[str, Any]]:
    """Return a chat with one image and `prompt` as its question."""
    text = {"type": "text", "text": prompt}
    return [{"role": "user", "content": [{"type": "image", "image": image}, text]}]


def scene_images(n_images: int, seed: int) -> Iterator[Image.Image]:
    """Yield the first training scenes of a seed."""
    scenes = Scenes()
    for index in range(n_images):
        yield scenes.scene("train", seed, index).to_pil()


def folder_images(folder: Path, n_images: int, seed: int) -> Iterator[Image.Image]:
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


def _open(path: Path) -> Image.Image:
    try:
        return open_image(path)
    except UserError as error:
        raise UserError(f"images_dir: {path.name!r} does not open as an image ({error})") from error
