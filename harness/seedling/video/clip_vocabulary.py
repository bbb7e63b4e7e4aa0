"""The closed word vocabulary of the video models: seedling's words, then times, places and events."""

from __future__ import annotations

from espalier.harness.seedling.vocabulary import UNK, VOCABULARY

MOST_FRAMES = 112
"""Number of time words; 112 frames of 144 tokens are 16,128."""

ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
PLACES = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)
"""The nine places of a frame, in reading order."""

# fmt: off
_NEW = (
    "<video>", "video", "time", "when", "find", "and", "it", "that", "before", "after", "or",
    "happens", "next", "enters", "leaves", "moves", "turns", "changes", "covered", "seen", "again",
    "from", "to", "order",
)
# fmt: on
_SIZE = 256
_KNOWN = (*VOCABULARY, *_NEW, *ROWS, *COLUMNS, *(f"t{frame}" for frame in range(MOST_FRAMES)))
WORDS: tuple[str, ...] = (
    *_KNOWN,
    *(f"<spare_{number}>" for number in range(_SIZE - len(_KNOWN))),
)
TOKEN_ID: dict[str, int] = {word: number for number, word in enumerate(WORDS)}
VIDEO = TOKEN_ID["<video>"]
FIRST_TIME = TOKEN_ID["t0"]


def encode(text: str) -> list[int]:
    """Return the token ids of space-separated words; unknown words become ``<unk>``."""
    return [TOKEN_ID.get(word, UNK) for word in text.split()]


def time_word(frame: int) -> str:
    """Return the word for the time of a frame, counted from 0."""
    return f"t{frame}"
