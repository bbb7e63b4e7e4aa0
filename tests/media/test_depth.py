"""Pictures with more than 8 bits per channel, and transparent ones: scaled, composited on white, or refused."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from espalier.harness.errors import UserError
from espalier.harness.media.images import open_image
from tests.media.test_media import stored

RAMP = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)


def pgm(values: np.ndarray, maximum: int) -> bytes:
    return f"P5 64 64 {maximum}\n".encode() + values.astype(">u2").tobytes()


def twelve_bits() -> bytes:
    """Return a TIFF with 12-bit samples, two of them in three bytes."""
    values = (RAMP // 16).ravel().astype(np.uint32)
    pairs = (values[0::2] << 12) | values[1::2]
    packed = b"".join(struct.pack(">I", pair)[1:] for pair in pairs.tolist())
    tags = {256: 64, 257: 64, 258: 12, 259: 1, 262: 1, 273: 4096, 277: 1, 278: 64, 279: len(packed)}
    written = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    written += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return written.ljust(4096, b"\0") + packed


WIDE = {
    "16-bit PNG": stored(Image.fromarray(RAMP)),
    "16-bit open image": Image.fromarray(RAMP),
    "16-bit image of the other byte order": Image.fromarray(RAMP.astype(">u2")),
    "16-bit TIFF": stored(Image.fromarray(RAMP), "TIFF"),
    "16-bit JPEG 2000": stored(Image.fromarray(RAMP), "JPEG2000"),
    "16-bit PGM": pgm(RAMP, 65535),
    "12-bit PGM": pgm(RAMP // 16, 4095),
    "12-bit TIFF": twelve_bits(),
    "float TIFF": stored(Image.fromarray((RAMP / 65535).astype(np.float32)), "TIFF"),
    "float open image": Image.fromarray((RAMP / 65535).astype(np.float32)),
    "32 bits in the range of 8": Image.fromarray((RAMP >> 8).astype(np.int32)),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_pictures_are_scaled_by_their_own_range(name: str) -> None:
    opened = np.asarray(open_image(WIDE[name]))
    assert opened.shape == (64, 64, 3)
    # Half a step of rounding, and what the narrower files have lost already.
    assert np.abs(opened[..., 0].astype(float) - RAMP / 257).max() <= 1.0
    assert (opened == opened[..., :1]).all()


@pytest.mark.parametrize(
    "source",
    [
        Image.fromarray(RAMP.astype(np.int32)),
        stored(Image.fromarray(RAMP.astype(np.int32)), "TIFF"),
        Image.fromarray(-RAMP.astype(np.int32)),
        Image.fromarray((RAMP / 257).astype(np.float32)),
        Image.fromarray(np.full((4, 4), np.nan, np.float32)),
        Image.fromarray(np.array([[0.5, np.nan]], np.float32)),
        Image.fromarray(np.array([[0.5, np.inf]], np.float32)),
        Image.fromarray(np.array([[-0.5, 0.5]], np.float32)),
    ],
)
def test_values_without_a_known_range_are_refused_in_one_line(source: Any) -> None:
    with pytest.raises(UserError, match=r"of unknown range; valid: values in \[0, "):
        open_image(source)


def test_wide_pictures_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = stored(Image.fromarray(RAMP[:32]), exif=exif)
    for source in (data, Image.open(io.BytesIO(data))):
        assert open_image(source).size == (32, 64)


def drawing() -> Image.Image:
    """A black dot on clear, black under it."""
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 1), (0, 0, 0, 255))
    return image


def keyed(mode: str) -> bytes:
    """The same with one value or entry that is clear."""
    image = Image.new(mode, (4, 4), 0)
    if mode == "P":
        image.putpalette([0, 0, 0, 0, 0, 0])
    image.putpixel((1, 1), (1, 1, 1) if mode == "RGB" else 1)
    return stored(image, transparency=(0, 0, 0) if mode == "RGB" else 0)


TRANSPARENT = {
    "RGBA": drawing(),
    "LA": drawing().convert("LA"),
    "premultiplied": drawing().convert("RGBa"),
    "PNG": stored(drawing()),
    "PNG of grey": stored(drawing().convert("LA")),
    "WebP": stored(drawing(), "WEBP", lossless=True),
    "palette": keyed("P"),
    "grey with a key": keyed("L"),
    "colours with a key": keyed("RGB"),
    "16 bits with a key": keyed("I;16"),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparency_is_dropped_or_laid_on_white(name: str) -> None:
    dropped, white = (np.asarray(open_image(TRANSPARENT[name], how)) for how in ("drop", "white"))
    assert dropped.max() <= 1
    assert (white[0, 0] == 255).all()
    assert white[1, 1].max() <= 1


def test_half_clear_is_half_white_and_opaque_pictures_do_not_change() -> None:
    grey = open_image(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "white").getpixel((0, 0))
    assert grey == (127, 127, 127)
    opaque = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    np.testing.assert_array_equal(open_image(opaque, "white"), opaque)
    np.testing.assert_array_equal(open_image(opaque.convert("CMYK"), "white"), opaque)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_a_picture_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=f"is {size[0]}x{size[1]}; valid: an image with pixels"):
        open_image(Image.new("RGB", size))


def test_names_that_no_file_system_takes_are_named() -> None:
    for name in ("a" * 5000, "a\0b.png"):
        with pytest.raises(UserError, match="does not exist; valid: an image file"):
            open_image(name)
