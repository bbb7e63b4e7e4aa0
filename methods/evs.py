"""EVS: "Efficient Video Sampling: Pruning Temporally Redundant Tokens" (Bagrov et al., 2025, arXiv 2510.14624).

With x[t, i] the projected token at place i of frame t,

    d[0, i] = 255,    d[t, i] = 1 - cos(x[t, i], x[t-1, i])

and the tokens with the largest d of all frames together stay, of equal ones the earlier. Since 255 > 2 >= d, the first
frame of a video is always whole. A frame is compared with the one before as it came, whatever of that is dropped.

Differs: followed is the code of its authors in vLLM (vllm/multimodal/video_prune/evs.py, version 0.32.0). A review of
the paper describes a choice by pixels, the L1 distance of a patch to the one before, with the same first frame and one
cut-off for the video; the paper's text itself was not compared. The code keeps max(n, floor((1 - q) T n)) of T frames
of n tokens: it exceeds a budget below one frame, which is refused here. It compares in the model's precision, here in
fp32. Positions are those of the whole video, as in both. Every video of a prompt keeps its own first frame, and they
share the budget; a picture is all first frame, so that pictures alone are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from espalier.methods.base import MethodError, Plan, Positions, Site, TokenReducer, View
from espalier.methods.checks import read, require_finite
from espalier.methods.select.frames import Frames
from espalier.methods.select.topk import top

#: What a token of a first frame counts as: more than any change.
FIRST = 255.0


@dataclass(frozen=True)
class EVS(TokenReducer):
    """Keeps the first frame, and the tokens that changed the most since the frame before."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def needs_frames(self) -> bool:
        """Return true: frames are compared."""
        return True

    def positions(self, depth: int) -> Positions:
        """Keep the positions of the whole video, as paper and released code."""
        del depth
        return "original"

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the tokens that changed the most. Cost: O(N (D + log N)), two device synchronisations.

        Raises:
            MethodError: first frames hold more than `keep`.
        """
        frames, n_tokens = Frames.of(view.grid), view.tokens.shape[1]
        n_whole = int(read(torch.where(frames.place == 0, frames.size, 0).sum(dim=1).max())[0])
        if keep < n_whole:
            raise MethodError(
                f"evs cannot keep {keep} of {n_tokens} visual tokens: first frames stay whole and hold {n_whole}; "
                f"valid: {n_whole} to {n_tokens} (ratio 0 to {math.floor((1 - n_whole / n_tokens) * 1e4) / 1e4:g})"
            )
        likeness = require_finite(frames.likeness(view.tokens, (frames.place > 0).long()), "tokens")
        first = frames.place.gather(1, frames.index) == 0
        change = torch.where(first, FIRST, 1 - likeness)
        return Plan(top(change, keep), scores=change)
