"""Linear layers and attention that multiply in bfloat16 while training.

PyTorch sends float32 products to MKL and bfloat16 products to oneDNN. On CPUs with AVX512-BF16 the
latter is about four times as fast at these sizes, on CPUs with AVX2 alone 37 times as slow: a short
measurement decides. Weights, softmax, optimiser and everything else stay in float32, and without
gradients the products are float32 too, so validation is exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _Bf16Product(torch.autograd.Function):
    """``x @ weight.T + bias`` with bfloat16 products and float32 results."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        low = weight.bfloat16()
        context.save_for_backward(rows, low)
        context.shape, context.biased = x.shape, bias is not None
        result = F.linear(rows, low).float()
        if bias is not None:
            result += bias
        shaped: torch.Tensor = result.view(*x.shape[:-1], -1)
        return shaped

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = context.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        low = grad.bfloat16()
        grad_x = None
        if context.needs_input_grad[0]:
            grad_x = (low @ weight).float().view(context.shape)
        grad_weight = (low.T @ rows).float() if context.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if context.biased else None


class Bf16Linear(nn.Linear):
    """A linear layer that uses :class:`_Bf16Product` while gradients are on."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps ``(..., in)`` to ``(..., out)`` in float32."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        result: torch.Tensor = _Bf16Product.apply(input, self.weight, self.bias)
        return result


class _Bf16Attention(torch.autograd.Function):
    """Softmax attention with bfloat16 products; faster here than the fused float32 kernel."""

    @staticmethod
    def forward(
        context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
        scores = (query @ key.transpose(-1, -2)).float().mul_(scale)
        if mask is not None:
            scores += mask
        shares = scores.softmax(-1).bfloat16()
        context.save_for_backward(query, key, value, shares)
        context.scale = scale
        return (shares @ value).float()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, shares = context.saved_tensors
        low = grad.bfloat16()
        grad_value = shares.transpose(-1, -2) @ low
        grad_shares = (low @ value.transpose(-1, -2)).float()
        grad_scores = torch.ops.aten._softmax_backward_data(
            grad_shares, shares.float(), -1, torch.float32
        )
        grad_scores = grad_scores.mul_(context.scale).bfloat16()
        grad_query, grad_key = grad_scores @ key, grad_scores.transpose(-1, -2) @ query
        return grad_query.float(), grad_key.float(), grad_value.float(), None, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Softmax attention over ``(B, heads, S, head_dim)``, with bfloat16 products while training.

    Args:
        query: Queries ``(B, heads, S, head_dim)``.
        key: Keys ``(B, heads, T, head_dim)``.
        value: Values ``(B, heads, T, head_dim)``.
        mask: Additive mask broadcastable to ``(B, heads, S, T)``, or None.
        scale: Factor of the scores; None means ``head_dim ** -0.5``.

    Returns:
        Mixed values ``(B, heads, S, head_dim)``.
    """
    if not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mixed: torch.Tensor = _Bf16Attention.apply(query, key, value, mask, scale)
    return mixed


def tower_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers' registry; the tower attends without a mask."""
    return attend(query, key, value, None, scaling).transpose(1, 2).contiguous(), None


def use_attention(model: Any, name: str, function: Callable[..., Any]) -> None:
    """Switches a transformers model, or one of its parts, to an attention function."""
    # transformers takes half a second to import, and the arithmetic above does not need it.
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
    model.config._attn_implementation = name


@lru_cache(maxsize=1)
def bf16_pays() -> bool:
    """Returns whether this machine multiplies faster in bfloat16 than in float32."""
    rows, weight = torch.ones(1024, 192), torch.ones(192, 384)
    pairs = [(rows.to(dtype), weight.to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    seconds = []
    for first, right in pairs:
        turns = []
        for _ in range(12):
            began = time.perf_counter()
            first @ right
            turns.append(time.perf_counter() - began)
        # The minimum: the first run prepares the kernel, and others may be interrupted.
        seconds.append(min(turns))
    return seconds[0] < seconds[1]


def use_fast_products(model: nn.Module, device: str) -> None:
    """Uses fast products for training: bfloat16 on a CPU, TF32 elsewhere.

    TF32 applies to the whole process.
    """
    if device == "cpu":
        use_bf16_products(model)
    else:
        torch.set_float32_matmul_precision("high")


def use_bf16_products(model: nn.Module) -> None:
    """Uses bfloat16 products in every linear layer while training, if that is faster."""
    if not bf16_pays():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Bf16Linear
