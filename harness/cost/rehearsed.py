"""Memory and tokens of the runs on simulated cards."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache

from espalier.harness.paths import CONF

#: What `make rehearsals` measured, a line a run.
REHEARSALS = CONF / "rehearsals.csv"
#: The benchmark of those that are rehearsed with a video beside a picture.
VIDEOS = "mvbench"

#: Patches of the tower per visual token, if the projector merges 2 x 2.
PATCHES = 4


@cache
def _rehearsed() -> list[dict[str, str]]:
    """Return the lines of unpruned prompts."""
    with REHEARSALS.open(encoding="utf-8") as file:
        return [line for line in csv.DictReader(file) if line["method"] == "none"]


def rehearsed_bytes() -> Mapping[str, int]:
    """Return the bytes beside weights of an unpruned picture or video, of the models rehearsed on one card."""
    return {
        line["model"]: int((float(line["peak"]) - float(line["weights"])) * 2**30)
        for line in _rehearsed()
        if line["cards"] == "1" and line["benchmark"] != VIDEOS
    }


def frame_tokens() -> Mapping[str, float]:
    """Return the visual tokens of a video's frame, of the models rehearsed with one."""
    return {
        line["model"]: int(line["visual"]) / int(line["clip"])
        for line in _rehearsed()
        if line["clip"]
    }
