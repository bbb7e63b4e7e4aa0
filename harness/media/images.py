"""Open images of data sets and benchmarks as the reference evaluations do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
from PIL import Image, ImageFile, ImageOps

from espalier.harness.errors import UserError
from espalier.harness.media import TRANSPARENCY

# Pillow's modes with more than 8 bits per channel; its conversion to RGB clips them at 255.
WIDE = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
# TIFF tags: bits per sample, and photometric interpretation, which is 0 if 0 is white.
BITS, WHITE_IS_ZERO = 258, 262

VALID = "a PIL image, a path, bytes, or a dict with bytes or a path"

# Exceptions of Pillow's readers for data that contradicts its header.
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
    """Pillow's option against incomplete data, which is global, held while any thread reads."""

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

    Files, bytes and open images are rotated by their EXIF orientation, as in `datasets` and transformers; rotation
    removes the orientation tag, so that no image is rotated twice. Images of 8 bits are converted by `convert("RGB")`,
    as in the tasks of lmms-eval; see `in_8_bits` for others.

    Args:
        source: a PIL image, a path, the bytes of a file, or a dict of `bytes` and `path` as stored by `datasets`, in
            which `bytes` take precedence.
        transparency: `drop` uses the colours under transparent areas, as in the tasks of lmms-eval; `white` composites
            the image on white.

    Returns:
        A loaded image of mode RGB.

    Raises:
        UserError: a missing file, not an image, an incomplete image, more pixels than Pillow allows, or values of
            unknown range.
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
    # Not Path.is_file and Path.exists, which raise for names that are too long.
    if not os.path.isfile(name):
        state = "is not a file" if os.path.exists(name) else "does not exist"
        raise UserError(f"image {name!r} {state}; valid: an image file")
    return _decode(name, name, transparency)


def in_8_bits(image: Image.Image, name: str = "image") -> Image.Image:
    """Return an image with 8 bits per channel; wider values are scaled by their range.

    16-bit values are divided by 257, 12-bit values of a TIFF are multiplied by 255 / 4095, floats in [0, 1] by 255.
    32-bit integers in [0, 255] are unchanged; those of a PGM are 16-bit values.

    Raises:
        UserError: other 32-bit integers or floats, of unknown range.
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
            f"image {name!r} of mode {image.mode} has values from {low:g} to {high:g}, of unknown range; "
            f"valid: values in [0, {maximum}], 8 or 16 bits"
        )
    return Image.fromarray(np.rint(values * (255 / maximum)).astype(np.uint8))


def _upright_rgb(image: Image.Image, name: str, transparency: str) -> Image.Image:
    """Return an open image, upright and in RGB."""
    if not (image.width and image.height):
        raise UserError(
            f"image {name!r} is {image.width}x{image.height}; valid: an image with pixels"
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
    """Return the bytes in a dict, or else the path."""
    for key in ("bytes", "path"):
        if source.get(key) is not None:
            return cast("bytes | str", source[key])
    raise UserError(
        f"image with keys {sorted(source)} has neither bytes nor a path; valid: {VALID}"
    )


def _decode(file: str | BytesIO, name: str, transparency: str) -> Image.Image:
    """Return the image of a file, upright and in RGB."""
    with _refusals(name), Image.open(file) as image, complete_only():
        return _upright_rgb(image, name, transparency)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn exceptions of Pillow into one line that names the image."""
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
        raise UserError(
            f"image {name!r} cannot be read as an image: {' '.join(str(problem).split())}"
        ) from problem


@contextmanager
def complete_only() -> Iterator[None]:
    """Make Pillow refuse incomplete data, in all threads, until the last thread leaves the block.

    On import lmms-eval allows incomplete data for the whole process, so that the missing part of an image would be
    scored as grey. Pillow has only a global option.
    """
    _SWITCH.hold()
    try:
        yield
    finally:
        _SWITCH.release()


#: Poppler's command, and a Python package.
RENDERERS = ("pdftoppm", "pypdfium2")
SECONDS = 120


def renderer() -> str | None:
    """Return the first of `RENDERERS` on this machine; None without any."""
    if shutil.which("pdftoppm"):
        return "pdftoppm"
    return "pypdfium2" if importlib.util.find_spec("pypdfium2") else None


def page_image(path: Path, page: int, longest: int) -> Image.Image:
    """Render a page (counted from 1) so that its longer side has `longest` pixels, as RGB.

    Raises:
        UserError: no renderer on this machine, or the file is missing or damaged.
    """
    backend = renderer()
    if backend is None:
        raise UserError(
            f"{str(path)!r} cannot be rendered; valid: a machine with {' or '.join(RENDERERS)}"
        )
    if not path.is_file():
        raise UserError(f"{str(path)!r} does not exist; valid: a PDF file")
    draw: dict[str, Callable[[Path, int, int], Image.Image]] = {
        "pdftoppm": _by_poppler,
        "pypdfium2": _by_pdfium,
    }
    return draw[backend](path, page, longest)


def _by_poppler(path: Path, page: int, longest: int) -> Image.Image:
    numbers = ["-f", str(page), "-l", str(page), "-singlefile", "-scale-to", str(longest)]
    try:
        done = subprocess.run(
            ["pdftoppm", "-png", *numbers, str(path)], capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{str(path)!r}: page {page} takes longer than {SECONDS} s to render"
        ) from error
    if done.returncode or not done.stdout:
        message = next(iter(done.stderr.decode(errors="replace").splitlines()), "no such page")
        raise UserError(f"{str(path)!r}: page {page} cannot be rendered: {message}")
    return open_image(done.stdout)


def _by_pdfium(path: Path, page: int, longest: int) -> Image.Image:
    # Not a dependency of Espalier.
    pdfium = importlib.import_module("pypdfium2")
    try:
        with pdfium.PdfDocument(path) as document:
            sheet = document[page - 1]
            return open_image(sheet.render(scale=longest / max(sheet.get_size())).to_pil())
    except (pdfium.PdfiumError, IndexError) as error:
        raise UserError(f"{str(path)!r}: page {page} cannot be rendered: {error}") from error
