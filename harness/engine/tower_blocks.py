"""The halves of a pre-norm block of a vision tower, so that a method can act between them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class TowerBlock:
    """One pre-norm block: `attend`, then `transform`, compute its forward.

    Args:
        module: the block.
    """

    def __init__(self, module: Any) -> None:
        self.module: nn.Module = module
        self.attention: nn.Module = module.self_attn
        self._block = module

    @property
    def kernel(self) -> str:
        """Name of the attention implementation."""
        return str(self._block.self_attn.config._attn_implementation)

    def attend(self, hidden: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
        """Return the residual stream (P, S, D) after the attention; `mask` is added to its logits."""
        states = self._block.layer_norm1(hidden)
        mixed: Tensor = self._block.self_attn(hidden_states=states, attention_mask=mask, **kwargs)[
            0
        ]
        return hidden + mixed

    def values(self, hidden: Tensor) -> Tensor:
        """Return (P, H, S, Dh) the values that the attention computes from the residual stream (P, S, D)."""
        attention = self._block.self_attn
        flat = attention.v_proj(self._block.layer_norm1(hidden))
        values: Tensor = flat.unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        return values

    def transform(self, hidden: Tensor) -> Tensor:
        """Return the residual stream (P, S, D) after the MLP."""
        states: Tensor = hidden + self._block.mlp(self._block.layer_norm2(hidden))
        return states
