"""The closed word vocabulary, and boxes as location tokens.

Other words become ``<unk>``: the model only understands its question templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from espalier.harness.seedling.scenes import BOX, COLOUR_NAMES, SHAPES, WIDTH

BINS = 32
BIN = WIDTH // BINS
"""Pixels per location bin."""

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<image>", "USER:", "ASSISTANT:")
# fmt: off
_WORDS = (
    "what", "is", "in", "the", "a", "of", "where", "there", "how", "many", "are", "read", "all",
    "describe", "digit", "digits", "shape", "shapes", "objects", "image", "frame", "colour",
    "with", "at", "yes", "no", "?", ".", ";",
)
# fmt: on
_SIZE = 104
_KNOWN = (
    *_SPECIAL,
    *_WORDS,
    *(str(i) for i in range(10)),
    *COLOUR_NAMES,
    *SHAPES,
    *(f"<loc_{i}>" for i in range(BINS)),
)
VOCABULARY: tuple[str, ...] = (*_KNOWN, *(f"<extra_{i}>" for i in range(_SIZE - len(_KNOWN))))
TOKEN_ID: dict[str, int] = {word: i for i, word in enumerate(VOCABULARY)}

PAD, BOS, EOS, UNK, IMAGE = (TOKEN_ID[word] for word in _SPECIAL[:5])
USER, ASSISTANT = TOKEN_ID["USER:"], TOKEN_ID["ASSISTANT:"]
MASK = TOKEN_ID["<extra_0>"]
"""Mask token of the denoising model."""

_LOCATION = re.compile(r"<loc_(\d+)>")


def encode(text: str, token_ids: Mapping[str, int] = TOKEN_ID) -> list[int]:
    """Return the token ids of space-separated words; unknown words become ``<unk>``."""
    return [token_ids.get(word, UNK) for word in text.split()]


def location(pixel: int) -> str:
    """Return the location token of a pixel coordinate, clipped to the image."""
    return f"<loc_{min(max(pixel, 0), WIDTH - 1) // BIN}>"


def box_text(box: BOX) -> str:
    """Return a box (x1, y1 exclusive) as four location tokens; the last two are its last pixels."""
    x0, y0, x1, y1 = box
    return " ".join(location(pixel) for pixel in (x0, y0, x1 - 1, y1 - 1))


def locations(text: str) -> list[int]:
    """Return the bins of all location tokens in a text, in order, without out-of-range ones."""
    bins = (int(match) for match in _LOCATION.findall(text))
    return [value for value in bins if value < BINS]


def box_from_bins(bins: Sequence[int]) -> BOX:
    """Return the box of four bins: bin centres, with x1 and y1 exclusive."""
    x0, y0, x1, y1 = bins
    return (x0 * BIN + 1, y0 * BIN + 1, x1 * BIN + 2, y1 * BIN + 2)


def parse_box(text: str) -> BOX | None:
    """Return the box in an answer; None unless it has exactly four location tokens."""
    bins = locations(text)
    return box_from_bins(bins) if len(bins) == 4 else None
