"""DyCoke: "Dynamic Compression of Tokens for Fast Video LLMs" (Tao et al., CVPR 2025, arXiv 2411.15024).

**Before the decoder**, over time. The frames of a video are cut into windows of four, 0 to 3. A frame is compared with
an earlier one, place by place, and loses the tokens that repeat it: of T tokens the (1 - K) T least similar stay,

    frame 1 with frame 0,    frame 3 with frame 2,    then frame 2 with frame 0;    cos(x_t[i], x_s[i])

all on the original tokens. Frame 0 stays whole, so that 1 - 3/4 K of a video remains. The authors call it merging, but
nothing is averaged. K follows from the budget: thinned frames share what `keep` leaves for them at the same K, rounded
up or down, evenly over time. Windows restart where the frames' size changes. A video's last window may be shorter: its
frames are compared as far as they exist. A frame is a frame of the model's input: Qwen's is two frames of the file.

    paper     every window is thinned
    official  the third frame of the last window stays whole, and videos of four frames or fewer are refused

The released code also drops the last frame of an odd number, which an exact budget cannot do at every ratio: here it
stays whole. It rounds each frame's (1 - K) T down, and leaves tokens in the order of similarity; here they ascend.

**While tokens are generated**, layers from l on attend to floor((1 - P) N) of the N visual entries of the cache, those
that the newest token attends to most in layer l - 1, mean over heads. Let a be that attention at this step:

    paper     the first step attends to all, and the second one chooses; its entries stay as long as cos(a, a of the
              step that chose them) is at least `threshold`; then they are chosen anew among all
    official  they are chosen anew wherever cos(a, a of the step before) is below `threshold`; at all other steps every
              entry is attended to. The first step has no predecessor, and its cosine is 0

(The released code never resets a, so that only the first sample of a process starts like this, and any other with the
attention of the previous sample. Here no answer depends on its neighbours: every sample starts like the first. Its
count of visual entries is one short, so that the last one is always attended to and P refers to the others; here the
last is chosen like any other.)

Any entry may come back, so the cache keeps them all: this part saves no memory, and arithmetic only in kernels that
skip masked entries. Text and generated tokens are always attended to. The budget's ratio applies to the first part; the
second one is active at every ratio, 0 included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from espalier.methods.base import Attended, MethodError, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require
from espalier.methods.select.frames import Frames, spread
from espalier.methods.select.quotas import top_of_groups
from espalier.methods.select.topk import ranking

Reading = Literal["paper", "official"]
WINDOW = 4
#: How many frames back each frame of a window is compared; 0 stays whole.
BACK = (0, 1, 2, 1)
ATTENTION = Need("last_attention")


@dataclass(frozen=True)
class DyCoke(TokenReducer):
    """Thins frames that repeat earlier ones, and attends to the visual entries that the newest token attends to most.

    Attributes:
        temporal: whether tokens are dropped before the decoder; false leaves the decoding part, which works on images
        too. l: first decoder layer that attends to part of the visual entries. P: share of the visual entries that it
        does not attend to; 0: no decoding part. threshold: cosine from which two steps' attention counts as the same.
        reading: of the paper or of the released code.
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
        valid = get_args(Reading)
        require(self.reading in valid, "reading", self.reading, ", ".join(valid))

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
        return (1 - (1 - share) * (WINDOW - 1) / WINDOW,) * n_sites

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the tokens that differ from an earlier frame. Cost: O(N (D + log N)), three device synchronisations.

        Raises:
            MethodError: no frame can be compared with an earlier one, or those that stay whole hold more than `keep`.
        """
        frames = Frames.of(view.grid)
        back = self.compared(frames)
        thinned = torch.where(back > 0, frames.size, 0)
        budget = keep - (frames.size - thinned).sum(dim=1, keepdim=True)
        self._require_frames(thinned, budget, keep)
        quotas = torch.where(back > 0, spread(thinned, budget), frames.size)
        scores = -frames.likeness(view.tokens, back)
        return Plan(top_of_groups(scores, frames.index, quotas, keep), scores=scores)

    def compared(self, frames: Frames) -> Tensor:
        """Return (B, N) how many frames back each frame is compared; 0 for frames that stay whole or are absent."""
        number = frames.place % WINDOW
        back = torch.tensor(BACK, device=number.device)[number]
        if self.reading == "official":
            # Window starts run to F - 5, so that the third frame of the last window is never reached.
            last = (number == 2) & (frames.place - 2 >= frames.length - WINDOW)
            back = torch.where(last | (frames.length <= WINDOW), 0, back)
        return torch.where(frames.size > 0, back, 0)

    def _require_frames(self, thinned: Tensor, budget: Tensor, keep: int) -> None:
        n_tokens = thinned.shape[1]
        fewest = 2 if self.reading == "paper" else WINDOW + 1
        if not bool((thinned.sum(dim=1) > 0).all()):
            raise MethodError(
                f"dycoke needs frames to compare, and a sample of {n_tokens} visual tokens has none; valid: videos of "
                f"{fewest} or more frames, or method.params.temporal=false"
            )
        if bool((budget < 0).any()):
            n_whole = keep - int(budget.min())
            raise MethodError(
                f"dycoke cannot keep {keep} of {n_tokens} visual tokens: frames that stay whole hold {n_whole}; valid: "
                f"{n_whole} to {n_tokens} (ratio 0 to {math.floor((1 - n_whole / n_tokens) * 1e4) / 1e4:g})"
            )

    def attend(self, view: View, last: Attended | None) -> Attended:
        """Choose the entries of this step. Cost: O(N log N), one device synchronisation."""
        now = view.signals[ATTENTION.key].float()
        official = self.reading == "official"
        if last is None and not official:
            return Attended(None, now)
        # The small term keeps 0.1 * 10 from becoming 0.999...
        n_attended = math.floor((1 - self.P) * now.shape[1] + 1e-9)
        best = ranking(now)[:, :n_attended]
        chosen = torch.zeros_like(now, dtype=torch.bool).scatter_(1, best, True)
        alike = (_likeness(now, last) >= self.threshold).unsqueeze(1)
        if last is None or official:
            return Attended(chosen | alike, now)
        if last.entries is None:
            return Attended(chosen, now)
        entries = torch.where(alike, last.entries, chosen)
        return Attended(entries, torch.where(alike, last.reference, now))


def _likeness(now: Tensor, last: Attended | None) -> Tensor:
    """Return (B,) cosines of an attention with the reference of the last step; 0 if there was none."""
    return now.new_zeros(now.shape[0]) if last is None else cosine_similarity(now, last.reference)
