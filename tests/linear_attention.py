"""The gated delta rule token by token, in the type of its inputs: transformers' class runs in single precision."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return outputs (B, L, H, Dv) and the last state (B, H, Dk, Dv) of heads that share keys in groups.

    S_t = exp(g_t) S_(t-1) + k_t beta_t (v_t - k_t exp(g_t) S_(t-1)), output q_t S_t / sqrt(Dk), keys and queries of
    length 1 (arXiv 2412.06464, equation 10).
    """
    del kwargs
    groups = value.shape[2] // key.shape[2]
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(groups, 2)
        for x in (query, key)
    )
    shape = value.shape[0], value.shape[2], key.shape[3], value.shape[3]
    state = value.new_zeros(shape) if initial_state is None else initial_state.to(value)
    outputs = []
    for t in range(value.shape[1]):
        state = state * g[:, t].to(value).exp()[..., None, None]
        guess = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        correction = (value[:, t] - guess) * beta[:, t].unsqueeze(-1)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], correction)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state) * key.shape[3] ** -0.5)
    return torch.stack(outputs, 1), state


RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def gated_norm(norm: Any, states: Tensor, gate: Tensor) -> Tensor:
    """Return states (..., D) of norm 1, weighted, times the gate's SiLU."""
    scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * states * scale * torch.nn.functional.silu(gate)


def in_doubles(decoder: Any) -> None:
    """Let the linear layers of a tiny model in fp64 run in fp64, so that the order of sums does not show."""

    def run(part: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with patch.multiple(type(part).__module__, **dict.fromkeys(RULES, delta_rule)):
            return forward(*args, **kwargs)

    for layer in decoder.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = partial(run, layer.linear_attn, layer.linear_attn.forward)
            norm = layer.linear_attn.norm
            norm.forward = partial(gated_norm, norm)
