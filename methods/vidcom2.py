"""VidCom2: "Video Compression Commander" (Liu et al., EMNLP 2025, arXiv 2505.14454).

Tokens are described by the D / 2 channels that vary least over the video, and scaled to length 1 there: y[t, i], place
i of frame t. With c the mean of all y, c[t] that of frame t, and

    G(u, v) = sum of exp(-|u - v|^2 / 2 a) over a = 1/8, 1/4, 1/2, 1, 2

a token is the more distinctive the smaller s[t, i] = G(y[t, i], c) + G(y[t, i], c[t]), and a frame the larger
f[t] = -mean_i G(y[t, i], c). With r = keep / N, p = softmax(f / 0.01) and n tokens a frame, frame t keeps the

    k[t] = round(n min(1, r (1 + p[t] - mean p))),    at least 1

tokens with the smallest s. Where rounding and bounds miss the budget, the kept tokens with the largest s go, over all
frames together, or the dropped ones with the smallest s come back.

Differs: followed is the released code (github.com/xuyang-liu16/VidCom2, commit 944a17d1), which keeps the k[t] as they
come; the last step is that of the code in vLLM 0.32.0 (vllm/multimodal/video_prune/vidcom2.py), which keeps at least
one token a frame. Here the budget is exact below that too. Of equal tokens and channels the first counts as smaller,
where both leave it open. Several videos of a prompt are scored each by itself and share the budget by their tokens; a
picture is a video of one frame. Newlines are not tokens here, and stay, as in the code for LLaVA-Video. Of the paper
its summary and the code were compared, not its full text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.frames import clips
from espalier.methods.select.quotas import best_of_groups
from espalier.methods.select.topk import filled_up, ranking

#: Widths a of the Gaussians.
WIDTHS = (1 / 8, 1 / 4, 1 / 2, 1, 2)


@dataclass(frozen=True)
class VidCom2(TokenReducer):
    """Keeps the tokens least like the mean of their frame and of the video, more in frames unlike the others.

    Attributes:
        channels: share of the channels that tokens are compared in, those that vary least.
        temperature: of the softmax over frames; small ones favour the most distinctive frame.
    """

    channels: float = 0.5
    temperature: float = 0.01

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(0 < self.channels <= 1, "channels", self.channels, "a number in (0, 1]")
        require(self.temperature > 0, "temperature", self.temperature, "a number above 0")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def needs_frames(self) -> bool:
        """Return true: frames are compared."""
        return True

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the distinctive tokens, video by video.

        Cost: O(N (D + log N)), two device synchronisations, and two a video.
        """
        tokens = require_finite(view.tokens.float(), "tokens")
        kept, scores = [], []
        for row, parts in enumerate(clips(view.grid, keep)):
            likeness = [self.likeness(clip.of(tokens[row])) for clip in parts]
            kept.append(
                torch.cat(
                    [
                        clip.span.start + self.chosen(video, video + frame, clip.keep)
                        for clip, (video, frame) in zip(parts, likeness, strict=True)
                    ]
                )
            )
            scores.append(-torch.cat([(video + frame).flatten() for video, frame in likeness]))
        return Plan(torch.stack(kept), scores=torch.stack(scores))

    def likeness(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, n) how alike the tokens (T, n, D) of a video are to its mean, and to that of their frame."""
        variance = tokens.flatten(0, 1).var(dim=0, unbiased=False)
        n_channels = max(1, int(tokens.shape[2] * self.channels))
        steady = variance.argsort(stable=True)[:n_channels].sort().values
        units = normalize(tokens[:, :, steady], dim=2)
        centres = units.mean(dim=(0, 1)), units.mean(dim=1, keepdim=True)
        video, frame = (gaussians((units - centre).square().sum(dim=2)) for centre in centres)
        return video, frame

    def chosen(self, video: Tensor, likeness: Tensor, keep: int) -> Tensor:
        """Return (keep,) ascending tokens of a video from its (T, n) likenesses to the mean, and to both means."""
        n_frames, size = likeness.shape
        weight = (-video.mean(dim=1) / self.temperature).softmax(dim=0)
        share = keep / likeness.numel() * (1 + weight - weight.mean())
        quotas = (share.clamp(max=1) * size).round().long().clamp(min=1)
        frame = torch.arange(n_frames, device=likeness.device).repeat_interleave(size)
        scores = -likeness.flatten().unsqueeze(0)
        best = best_of_groups(scores, frame.unsqueeze(0), quotas.unsqueeze(0))
        return filled_up(best, ranking(scores), keep).kept[0]


def gaussians(squared: Tensor) -> Tensor:
    """Return the sum of the Gaussians at squared distances."""
    return torch.stack([(-squared / (2 * width)).exp() for width in WIDTHS]).sum(dim=0)
