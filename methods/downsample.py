"""Downsampling: the picture itself is made smaller, the control of VTC-Bench (Liao et al., arXiv 2510.07143).

To keep a share s of the visual tokens, a picture of H x W pixels becomes one of sqrt(s) H x sqrt(s) W (there
D^2 = 1 - C). The tower has a fixed resolution here, so the small picture is enlarged to H x W again before it enters,
and of the tower's N tokens the `keep` central ones of the same regions as in `uniform` stay. The budget is exact, as
for every method; the two controls differ by the detail that the picture lost. The tower costs what it always costs.

In VTC-Bench the models accept pictures of any size (Qwen2-VL), and the tower gets the small picture: every token then
covers a larger part of it. There, `method=none` with a smaller `model.processor.max_pixels` is that baseline. Pictures
are resized by bicubic interpolation with a low-pass filter, each view and frame by itself, after the processor has cut
and normalised them. With `keep` in place of a ratio, the share of pixels is that of a picture of nominal size.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.uniform import Uniform


@dataclass(frozen=True)
class Downsample(Uniform):
    """Shows the tower a picture with the budget's share of pixels, and keeps evenly spread tokens."""

    shrinks_pictures = True
