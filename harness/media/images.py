"""Images as data sets and benchmarks hand them over, opened as the reference evaluations open them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from os import PathLike, fspath
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps

from espalier.harness.errors import UserError

#: `model.transparency`: what becomes of it.
TRANSPARENCY = ("drop", "white")

# Pillow's modes of more than 8 bits a channel, which its own conversion to RGB cuts off at 255.
WIDE = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# Tags of TIFF: bits of a sample, and whether 0 is white.
BITS, WHITE_IS_ZERO = 258, 262

VALID = "a PIL image, a path, bytes, or a dict with bytes or a path"

# All that Pillow's readers are known to raise on data that is not what its header says.
BROKEN = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    IndexError,
    KeyError,
    RuntimeError,
    struct.error,
)


class _Switch:
    """Pillow's only option against incomplete data, a global one, held for as long as some thread reads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._readers = 0
        self._before = False

    def hold(self) -> None:
        with self._lock:
            if not self._readers:
                self._before = ImageFile.LOAD_TRUNCATED_IMAGES
            self._readers += 1
            ImageFile.LOAD_TRUNCATED_IMAGES = False

    def release(self) -> None:
        with self._lock:
            self._readers -= 1
            if not self._readers:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._before


_SWITCH = _Switch()


def open_image(
    source: Image.Image | str | PathLike[str] | bytes | Mapping[str, Any],
    transparency: str = TRANSPARENCY[0],
) -> Image.Image:
    """Open an image as RGB, upright.

    Files, bytes and images that are open already are turned by their EXIF orientation, as `datasets` and transformers
    turn them; whoever turns an image takes the orientation out of it, so that nothing is turned twice.

    Colour of 8 bits is `convert("RGB")`, as in the tasks of lmms-eval; see `in_8_bits` for more.

    Args:
        source: a PIL image, a path, the bytes of a file, or a dict of `bytes` and `path` as `datasets` stores it, whose
            bytes win.
        transparency: `drop` takes the colours as they are under it, as the tasks of lmms-eval do; `white` lays them on
            white.

    Returns:
        A loaded image of mode RGB.

    Raises:
        UserError: nothing there, not an image, an incomplete one, one of more pixels than Pillow allows, or one whose
            values have no known range.
    """
    if isinstance(source, Image.Image):
        name = getattr(source, "filename", "") or "image"
        with _refusals(str(name)), complete_only():
            return _upright_rgb(source, str(name), transparency)
    if isinstance(source, Mapping):
        source = _stored_source(source)
    if isinstance(source, bytes):
        return _decode(BytesIO(source), "bytes", transparency)
    if not isinstance(source, str | PathLike):
        raise UserError(f"image={type(source).__name__} cannot be opened; valid: {VALID}")
    name = fspath(source)
    # Not Path's: they raise on names that are too long.
    if not os.path.isfile(name):
        state = "is not a file" if os.path.exists(name) else "does not exist"
        raise UserError(f"image {name!r} {state}; valid: an image file")
    return _decode(name, name, transparency)


def in_8_bits(image: Image.Image, name: str = "image") -> Image.Image:
    """Return an image of 8 bits a channel: those of more are scaled by their own range, others stay as they are.

    16 bits are a 257th of their value, 12 bits of a TIFF a 4095th of 255. Floats in [0, 1] are 255 times that. Integers
    of 32 bits in [0, 255] are taken as they are; a PGM's are 16 bits.

    Raises:
        UserError: other values of 32 bits or floats, whose range nothing states.
    """
    if image.mode not in WIDE:
        return image
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})
    if image.mode.startswith("I;16"):
        bits = tags.get(BITS, (16,))[0]
        maximum = 2**bits - 1 if bits in range(9, 16) else 65535
        if tags.get(WHITE_IS_ZERO) == 0:
            values = maximum - values
    elif image.mode == "F":
        maximum = 1
    else:
        maximum = 65535 if image.format == "PPM" else 255
    low, high = values.min(initial=0), values.max(initial=0)
    if not (low >= 0 and high <= maximum):  # NaN is neither
        raise UserError(
            f"image {name!r} of mode {image.mode} has values from {low:g} to {high:g}, and no range that is known; "
            f"valid: values in [0, {maximum}], 8 or 16 bits"
        )
    return Image.fromarray(np.rint(values * (255 / maximum)).astype(np.uint8))


def _upright_rgb(image: Image.Image, name: str, transparency: str) -> Image.Image:
    """Return an open image, turned and in RGB."""
    if not (image.width and image.height):
        raise UserError(
            f"image {name!r} is {image.width}x{image.height}; valid: one that has pixels"
        )
    image.load()
    key = image.info.get("transparency") if image.mode in WIDE else None
    narrow = in_8_bits(image, name)
    if key is not None and transparency == "white":
        narrow = narrow.convert("RGB")
        narrow.paste((255, 255, 255), mask=Image.fromarray(np.asarray(image) == key))
    if narrow is not image:
        narrow.info.update(image.info)
        narrow.info.pop("transparency", None)
        narrow.getexif().update(image.getexif())
    upright = ImageOps.exif_transpose(narrow)
    if transparency == "white" and upright.has_transparency_data:
        over = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return upright.convert("RGB")


def _stored_source(source: Mapping[str, Any]) -> bytes | str:
    """Return the bytes of a dict, or else its path."""
    for key in ("bytes", "path"):
        if source.get(key) is not None:
            return source[key]  # type: ignore[no-any-return]
    raise UserError(
        f"image with keys {sorted(source)} has neither bytes nor a path; valid: {VALID}"
    )


def _decode(file: str | BytesIO, name: str, transparency: str) -> Image.Image:
    """Return a file's image, upright, in RGB."""
    with _refusals(name), Image.open(file) as image, complete_only():
        return _upright_rgb(image, name, transparency)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn what Pillow raises into one line that names the image."""
    try:
        yield
    except UserError:
        raise
    except Image.DecompressionBombError as problem:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise UserError(
            f"image {name!r} has more than {limit} pixels, Pillow's limit against decompression bombs"
        ) from problem
    except BROKEN as problem:
        words = " ".join(str(problem).split())
        raise UserError(f"image {name!r} cannot be read as an image: {words}") from problem


@contextmanager
def complete_only() -> Iterator[None]:
    """Have Pillow refuse incomplete data, in all threads, until the last of them leaves its block.

    lmms-eval switches that off for the whole process when it is imported, and half an image would be scored with grey
    for the other half. Pillow has no such option but the global one.
    """
    _SWITCH.hold()
    try:
        yield
    finally:
        _SWITCH.release()
