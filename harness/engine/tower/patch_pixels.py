"""Pixels of a tower's patches, read where pictures enter its first convolution: the signal `pixels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold
from torch.utils.hooks import RemovableHandle


class PatchPixels:
    """Holds the pixels of the running tower call, as (P, N, F) numbers in [0, 1].

    Args:
        tower: its first convolution cuts pictures into patches.
        mean: of each colour, by which pixels in [0, 1] were normalised.
        std: standard deviation of each colour.
    """

    def __init__(self, tower: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        self._embedding = next(part for part in tower.modules() if isinstance(part, nn.Conv2d))
        self._mean, self._std = mean, std
        self._handle: RemovableHandle
        self.pixels: Tensor

    def open(self) -> None:
        """Watch the convolution."""
        self._handle = self._embedding.register_forward_pre_hook(self._store)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _store(self, embedding: nn.Conv2d, arguments: tuple[Tensor]) -> None:
        pictures = arguments[0].to(torch.promote_types(arguments[0].dtype, torch.float32))
        std, mean = (
            pictures.new_tensor(values).view(-1, 1, 1) for values in (self._std, self._mean)
        )
        patches = unfold(pictures * std + mean, embedding.kernel_size, stride=embedding.stride)
        self.pixels = patches.transpose(1, 2)
