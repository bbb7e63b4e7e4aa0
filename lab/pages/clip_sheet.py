"""A clip as one picture: `python -m lab.pages.clip_sheet <index> --write <file>`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from PIL import Image, ImageDraw

from espalier.harness.seedling.counter_random import SPLITS
from espalier.harness.seedling.scenes import WIDTH
from espalier.harness.seedling.video.clips import DrawnClip, clip
from espalier.harness.seedling.video.dialogues import dialogue_stream, dialogues
from espalier.harness.seedling.video.events import time_word

COLUMNS = 8
HEAD, GAP = 14, 4
"""Pixels above a frame, for its time, and to its right."""


def sheet(clip: DrawnClip, scale: int = 2) -> Image.Image:
    """Return the frames of a clip in rows of eight, enlarged, with their times above."""
    side = WIDTH * scale
    rows = -(-clip.length // COLUMNS)
    page = Image.new("RGB", (COLUMNS * (side + GAP), rows * (side + HEAD)), "white")
    pen = ImageDraw.Draw(page)
    for number, pixels in enumerate(clip.frames):
        row, column = divmod(number, COLUMNS)
        left, top = column * (side + GAP), row * (side + HEAD)
        pen.text((left, top), time_word(number), fill="black")
        frame = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
        page.paste(frame, (left, top + HEAD))
    return page


def main(argv: Sequence[str]) -> int:
    """Write the picture of a clip and print its questions with their answers."""
    parser = ArgumentParser(prog="python -m lab.pages.clip_sheet", description=__doc__)
    parser.add_argument("index", type=int)
    parser.add_argument("--split", choices=tuple(SPLITS), default="val")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--scale", type=int, default=2)
    parser.add_argument("--write", required=True)
    args = parser.parse_args(argv)
    drawn = clip(args.split, args.seed, args.index, args.frames)
    sheet(drawn, args.scale).save(args.write)
    for family, question, answer, *_ in dialogues(drawn, dialogue_stream(drawn)):
        print(f"{family}: {question} -> {answer}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
