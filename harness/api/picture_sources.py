"""Pictures that a caller may pass: PIL images, files, addresses, bytes, arrays and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image

from espalier.harness.errors import UserError, first_words
from espalier.harness.media.images import open_image

VALID = (
    "a PIL image, a path, an address (http, https), bytes of a file, an array or tensor of uint8 or of floats in "
    "[0, 1], espalier.video(...), a list of these, or None"
)
SHAPES = "(H, W), (H, W, 3) or (H, W, 4), of tensors also (3, H, W)"

#: Seconds to wait for an address, and the largest file in bytes.
PATIENCE, LARGEST = 20.0, 64 * 2**20


def opened_picture(source: Any, transparency: str) -> Image.Image:
    """Return a caller's picture as RGB, upright.

    Args:
        source: see `VALID`; floats are scaled by 255.
        transparency: as `model.transparency`.

    Raises:
        UserError: another type, shape or range, or nothing that can be opened.
    """
    if isinstance(source, torch.Tensor):
        source = _channels_last(source.detach().cpu())
    if isinstance(source, np.ndarray):
        source = _image_of(source)
    elif isinstance(source, str) and source.startswith(("http://", "https://")):
        source = _downloaded(source)
    if not isinstance(source, Image.Image | str | PathLike | bytes | Mapping):
        raise UserError(f"image={type(source).__name__} cannot be opened; valid: {VALID}")
    return open_image(source, transparency)


def _channels_last(tensor: torch.Tensor) -> np.ndarray:
    channels = (1, 3, 4)
    first = tensor.dim() == 3 and tensor.shape[0] in channels and tensor.shape[2] not in channels
    tensor = tensor.permute(1, 2, 0) if first else tensor
    array: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return array


def _image_of(array: np.ndarray) -> Image.Image:
    channels = (*array.shape, 1)[2] if array.ndim in (2, 3) else 0
    is_float = np.issubdtype(array.dtype, np.floating)
    if (array.dtype != np.uint8 and not is_float) or channels not in (1, 3, 4):
        raise UserError(
            f"image of shape {array.shape} and {array.dtype}; valid: uint8, or floats in [0, 1], of {SHAPES}"
        )
    if is_float:
        low, high = float(array.min(initial=0)), float(array.max(initial=0))
        if not (low >= 0 and high <= 1):  # NaN is neither
            raise UserError(
                f"image of {array.dtype} has values from {low:g} to {high:g}, such as pixels that a processor has "
                "normalised; valid: floats in [0, 1], or uint8"
            )
        array = np.rint(array * 255).astype(np.uint8)
    return Image.fromarray(array.squeeze(2) if array.shape[2:] == (1,) else array)


def _downloaded(address: str) -> bytes:
    try:
        with urlopen(address, timeout=PATIENCE) as response:
            content: bytes = response.read(LARGEST + 1)
    except (URLError, OSError, ValueError) as error:
        raise UserError(
            f"image {address!r} cannot be fetched ({first_words(error)}); valid: an address that responds, or a path"
        ) from error
    if len(content) > LARGEST:
        raise UserError(f"image {address!r} is larger than {LARGEST} bytes; valid: a path")
    return content
