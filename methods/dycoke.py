"""DyCoke: "Dynamic Compression of Tokens for Fast Video LLMs" (Tao et al., CVPR 2025, arXiv 2411.15024).

**Before the decoder**, over time. The frames of a video are cut into windows of four, 0 to 3. A frame is compared with
an earlier one, place by place, and loses the tokens that repeat it: of T tokens the (1 - K) T least similar stay,

    frame 1 with frame 0,    frame 3 with frame 2,    then frame 2 with frame 0;    cos(x_t[i], x_s[i])

all on the original tokens. Frame 0 stays whole, so that 1 - 3/4 K of a video remains. The authors call it merging, but
nothing is averaged. K follows from the budget: thinned frames share what `keep` leaves for them, rounded up or down,
evenly over time. Windows restart where the frames' size changes; a last window may be shorter. A frame is one of the
model's input: Qwen's is two frames of the file.

    paper     every window is thinned
    official  the third frame of the last window stays whole, and videos of four frames or fewer are refused

Differs: the released code also drops the last frame of an odd number, which an exact budget cannot do at every ratio:
here it stays whole. It rounds each frame's (1 - K) T down, and leaves tokens in the order of similarity; here they
ascend.

**While tokens are generated**, layers from l on attend to part of the visual entries (methods/select/step_entries.py).
The budget's ratio applies to the first part; the second one is active at every ratio, 0 included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from espalier.methods.base import Attended, MethodError, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, read, require, require_choices
from espalier.methods.select.frames import Frames, spread
from espalier.methods.select.quotas import top_of_groups
from espalier.methods.select.step_entries import entries_of_step

Reading = Literal["paper", "official"]
BACK = (0, 1, 2, 1)  # how many frames back each frame of a window is compared; 0 stays whole
ATTENTION = Need("last_attention")


@dataclass(frozen=True)
class DyCoke(TokenReducer):
    """Thins frames that repeat earlier ones, and attends to the visual entries that the newest token attends to most.

    Attributes:
        temporal: whether tokens are dropped before the decoder; the decoding part alone works on images too.
        l: first decoder layer that attends to part of the visual entries.
        P: share of the entries left out; 0: none.
        threshold: cosine from which two steps' attention counts as the same.
        reading: paper or released code.
    """

    temporal: bool = True
    l: int = 3  # noqa: E741 (the paper's name)
    P: float = 0.7
    threshold: float = 0.9
    reading: Reading = "paper"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.l >= 1, "l", self.l, "1 or more (the attention of layer l-1 is read)")
        require(0 <= self.P < 1, "P", self.P, "0 <= P < 1")
        require(self.temporal or self.P > 0, "P", self.P, "above 0 where temporal is false")
        require(-1 <= self.threshold <= 1, "threshold", self.threshold, "a cosine, -1 to 1")
        require_choices(self, reading=Reading)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),) if self.temporal else ()

    def decode_site(self, depth: int) -> Site | None:
        """Return the decoding steps from layer l on."""
        site = layer_site("l", self.l, depth)
        return replace(site, where="decode") if self.P > 0 else None

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the newest token's attention while tokens are generated."""
        return (ATTENTION,) if site.where == "decode" else ()

    def needs_frames(self) -> bool:
        """Return whether frames are compared."""
        return self.temporal

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return 1 - 3/4 K with K = 1 - share: one frame of each window stays."""
        return (1 - (1 - share) * (len(BACK) - 1) / len(BACK),) * n_sites

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the tokens that differ from an earlier frame. Cost: O(N (D + log N)), one read of the device.

        Raises:
            MethodError: no frame can be compared with an earlier one, or those that stay whole hold more than `keep`.
        """
        frames = Frames.of(view.grid)
        official, n_tokens = self.reading == "official", view.tokens.shape[1]
        back = frames.in_windows(BACK, last_whole=official)
        thinned = torch.where(back > 0, frames.size, 0)
        budget = keep - (frames.size - thinned).sum(dim=1, keepdim=True)
        compared, room = read((thinned.sum(dim=1) > 0).all(), budget.min())
        if not compared:
            raise MethodError(
                f"dycoke needs frames to compare, and a sample of {n_tokens} visual tokens has none; valid: videos of "
                f"{len(BACK) + 1 if official else 2} or more frames, or method.params.temporal=false"
            )
        if room < 0:
            n_whole = keep - int(room)
            raise MethodError(
                f"dycoke cannot keep {keep} of {n_tokens} visual tokens: frames that stay whole hold {n_whole}; valid: "
                f"{n_whole} to {n_tokens} (ratio 0 to {math.floor((1 - n_whole / n_tokens) * 1e4) / 1e4:g})"
            )
        quotas = torch.where(back > 0, spread(thinned, budget), frames.size)
        scores = -frames.likeness(view.tokens, back)
        return Plan(top_of_groups(scores, frames.index, quotas, keep), scores=scores)

    def attend(self, view: View, last: Attended | None) -> Attended:
        """Choose the entries of this step. Cost: O(N log N), without a read."""
        now = view.signals[ATTENTION.key].float()
        return entries_of_step(now, last, self.P, self.threshold, self.reading == "official")
