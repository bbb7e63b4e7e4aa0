"""Attention masks of a shortened batch, in the form that the model's attention back end expects.

Visibility is defined in `espalier.harness.engine.visibility`; the library builds the masks that it supports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from espalier.harness.engine.visibility import Visibility, visibility_of
from espalier.harness.errors import UserError


def prefill_mask(config: Any, hidden: Tensor, valid: Tensor, padded: bool) -> Tensor | None:
    """Return the mask over the slots of `hidden` (B, M, D); the library builds it, also for a stack that is not causal.

    Padding queries may see themselves, so that no softmax row is empty.
    """
    mask: Any = create_causal_mask(config, hidden, valid if padded else None, None)
    if padded and mask is not None and mask.dim() == 4:
        diagonal = torch.eye(hidden.shape[1], dtype=torch.bool, device=mask.device)
        mask = _allow(mask, (~valid)[:, None, :, None] & diagonal)
    result: Tensor | None = mask
    return result


def decode_mask(
    config: Any, hidden: Tensor, valid: Tensor, padded: bool, cache: Any, layer: int
) -> Tensor | None:
    """Return the mask of the new tokens of `hidden` (B, t, D) over layer `layer`'s own cache and themselves."""
    key_valid = None
    if padded:
        n_new = cache.get_seq_length(layer) + hidden.shape[1] - valid.shape[1]
        key_valid = torch.cat([valid, valid.new_ones(valid.shape[0], n_new)], dim=1)
    mask: Any = create_causal_mask(config, hidden, key_valid, cache, layer_idx=layer)
    result: Tensor | None = mask
    return result


def reference_mask(
    config: Any, hidden: Tensor, alive: Tensor, n_past: int, visibility: Visibility | None = None
) -> Tensor:
    """Return the explicit (B, 1, Q, S) mask of new tokens: visible keys among those alive, and each token itself.

    Args:
        config: text configuration; eager attention takes an additive mask, sdpa a boolean one.
        hidden: (B, Q, D) new hidden states, for shape, type and device.
        alive: (B, n_past + Q) keys that may be seen.
        n_past: keys already cached.
        visibility: attention visibility; None: as in the configuration.

    Raises:
        UserError: the back end takes no mask.
    """
    n_query, n_keys = hidden.shape[1], n_past + hidden.shape[1]
    key = torch.arange(n_keys, device=hidden.device)
    query = n_past + torch.arange(n_query, device=hidden.device)
    diagonal = key[None, :] == query[:, None]
    visible = (visibility or visibility_of(config)).sees(query, n_keys)
    return explicit_mask(config, hidden, ((visible & alive[:, None, :]) | diagonal)[:, None])


def explicit_mask(config: Any, hidden: Tensor, visible: Tensor) -> Tensor:
    """Return the mask that lets new tokens `hidden` (B, Q, D) see the keys of `visible` (B, 1, Q, S), as booleans.

    Raises:
        UserError: the back end takes no mask.
    """
    name = config._attn_implementation
    if name.startswith("flash"):
        raise UserError(f"model.attention={name!r} takes no explicit mask; valid: sdpa, eager")
    if name == "eager":
        zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
        return torch.where(visible, zero, torch.finfo(hidden.dtype).min)
    return visible


def _allow(mask: Tensor, extra: Tensor) -> Tensor:
    """Open the positions `extra` in a boolean or additive mask."""
    return mask | extra if mask.dtype == torch.bool else mask.masked_fill(extra, 0.0)
