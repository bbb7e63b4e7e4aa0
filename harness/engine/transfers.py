"""Copies between host and device in one piece: each waits for all that the device has queued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Return integer or boolean tensors on the host, by one copy.

    Tensors of further cards go through the first one's.
    """
    device = tensors[0].device
    flat = torch.cat([tensor.to(device, torch.long).flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        part.view(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays of int64 on a device, by one copy."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
