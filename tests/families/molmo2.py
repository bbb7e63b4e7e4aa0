"""Molmo2 with pictures and with videos: crops, marks and newlines, pooled patches, pictures that see one another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from espalier.harness.specs.run_spec import VideoSpec
from tests.families.onevision import video, watch
from tests.tiny import SHAPES, TEXT, Family, causal, tiny_spec

#: A tower of 5 x 5 patches, so that some tokens pool fewer than 4; crops that overlap; wide heads.
ARCHITECTURE: dict[str, Any] = {
    "text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0e4}},
    "vision": {"image_size": 35, "patch_size": 7},
    "vision_feature_layer": [1, 0],
    "crops": {"overlap_margins": [1, 1], "max_crops": 4},
    "model": {"tie_word_embeddings": False},
}


def sees(after: int, visual: torch.Tensor, layer: int) -> torch.Tensor:
    """Return (L, L): tokens see those up to themselves; visual tokens and marks see all visual tokens and marks.

    `after` counts the marks behind the last visual token of a picture or a frame; one mark is before its first.
    """
    joined = visual.clone()
    places = visual.nonzero()[:, 0].tolist()
    for place, following in pairwise([-9, *places, len(visual) + 9]):
        # A newline, an end and the begin of the next view; texts between pictures and frames are longer.
        if following - place <= 4:
            joined[place:following] = True
            continue
        if place >= 0:
            joined[place : place + after + 1] = True
        if following < len(visual):
            joined[following - 1] = True
    return causal(visual, layer) | (joined[:, None] & joined)


_SPEC = tiny_spec(
    "molmo2",
    text=replace(TEXT, head_dim=16),
    projector=(64, 32, 32, 48, 32),
    class_attention="mean",
    architecture=ARCHITECTURE,
    video=VideoSpec(frames=3),
)
MOLMO2 = replace(_SPEC, facts=replace(_SPEC.facts, gated_projector=True))

FILMS = (
    watch("w1 w2 w3", video(1)),
    watch("w4", video(2, frames=2)),
    watch("w5 w6 w7 w8 w9", video(3)),
)

FAMILIES = {
    "molmo2": Family(MOLMO2, tuple(SHAPES), partial(sees, 2)),
    "molmo2_video": Family(MOLMO2, FILMS, partial(sees, 1)),
}
