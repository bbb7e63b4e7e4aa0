"""Images as data sets and benchmarks hand them over, opened as the reference evaluations open them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from threading import Lock
from typing import Any

from PIL import Image, ImageFile, ImageOps

from harness.errors import UserError

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
) -> Image.Image:
    """Open an image as RGB.

    Files and bytes are turned upright by their EXIF orientation, as `datasets` does when it decodes an image column and
    transformers when it is given a path. The pixels of an image that is open already stay as they are: `datasets` has
    turned it, and one that a task opened by hand reaches the processor unturned in the reference evaluation too.

    Colour is `convert("RGB")`, as in the tasks of lmms-eval: transparency is dropped, not laid on white.

    Args:
        source: a PIL image, a path, the bytes of a file, or a dict of `bytes` and `path` as `datasets` stores it, whose
            bytes win.

    Returns:
        A loaded image of mode RGB.

    Raises:
        UserError: nothing there, not an image, an incomplete one, or one of more pixels than Pillow allows.
    """
    if isinstance(source, Image.Image):
        with _refusals(getattr(source, "filename", "") or "image"), complete_only():
            return source.convert("RGB")
    if isinstance(source, Mapping):
        source = _of_dict(source)
    if isinstance(source, bytes):
        return _decode(BytesIO(source), "bytes")
    if not isinstance(source, str | PathLike):
        raise UserError(f"image={type(source).__name__} cannot be opened; valid: {VALID}")
    name = fspath(source)
    if not Path(name).is_file():
        state = "is not a file" if Path(name).exists() else "does not exist"
        raise UserError(f"image {name!r} {state}; valid: an image file")
    return _decode(name, name)


def _of_dict(source: Mapping[str, Any]) -> bytes | str:
    """Return the bytes of a dict, or else its path."""
    for key in ("bytes", "path"):
        if source.get(key) is not None:
            return source[key]  # type: ignore[no-any-return]
    raise UserError(
        f"image with keys {sorted(source)} has neither bytes nor a path; valid: {VALID}"
    )


def _decode(file: str | BytesIO, name: str) -> Image.Image:
    """Return a file's image, upright, in RGB."""
    with _refusals(name), Image.open(file) as image, complete_only():
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn what Pillow raises into one line that names the image."""
    try:
        yield
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
