"""The sizes of a transformer stack, read off its modules: what `model.facts` states, as the built model has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from espalier.harness.cost.facts import StackFacts

#: What transformers' families call the same parts.
ATTENTION = ("self_attn", "attention", "attn")
OUTPUT = ("o_proj", "out_proj", "projection_layer", "proj")
KEYS = ("k_proj",)
FUSED = ("qkv_proj", "qkv")
HEADS = ("num_attention_heads", "num_heads")
GATES = ("gate_proj", "gate_up_proj")


def read_stack(layers: Sequence[nn.Module], window_layers: int) -> StackFacts:
    """Return the facts of a stack of which at most layer 0 differs from the others, by the width of its MLP.

    Args:
        layers: the layers that count; weights may be on the meta device.
        window_layers: those of them whose attention stays inside windows, which no module of all families says alike.
    """
    attention = _part(layers[-1], ATTENTION)
    output = _part(attention, OUTPUT)
    heads = next(
        int(getattr(place, name))
        for place in (attention, getattr(attention, "config", None))
        for name in HEADS
        if hasattr(place, name)
    )
    head_dim = output.in_features // heads
    first, body = _mlp(layers[0]), _mlp(layers[-1])
    return StackFacts(
        layers=len(layers),
        hidden=output.out_features,
        intermediate=body.width,
        heads=heads,
        kv_heads=_key_width(attention, output.in_features) // head_dim,
        head_dim=head_dim,
        gated=body.gated,
        causal=_causal(attention),
        window_layers=window_layers,
        first_intermediate=None if first == body else first.width,
        experts=body.experts,
    )


def _causal(attention: Any) -> bool:
    """Return whether an attention looks back alone: its configuration's word goes before its own, as in the library."""
    default = getattr(attention, "is_causal", False)
    return bool(getattr(getattr(attention, "config", None), "is_causal", default))


def linear_widths(module: nn.Module) -> tuple[int, ...]:
    """Return the widths of a chain of linear maps, in the order in which the module holds them."""
    maps = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return (maps[0].in_features, *(linear.out_features for linear in maps))


@dataclass(frozen=True)
class _Mlp:
    """Width that one token goes through, whether it is gated, and how many experts a router chooses from."""

    width: int
    gated: bool
    experts: int


def _mlp(layer: Any) -> _Mlp:
    mlp = layer.mlp
    if not hasattr(mlp, "experts"):
        return _Mlp(_down_width(mlp), _gated(mlp), 0)
    # All experts lie in one tensor (experts, hidden, width of one); the shared ones are one MLP.
    number, _, width = mlp.experts.down_proj.shape
    routed = mlp.gate.top_k * width
    return _Mlp(routed + _down_width(mlp.shared_experts), _gated(mlp.experts), number)


def _down_width(mlp: nn.Module) -> int:
    """Return the width that the last linear map starts from."""
    return [part for part in mlp.modules() if isinstance(part, nn.Linear)][-1].in_features


def _gated(mlp: nn.Module) -> bool:
    return any(hasattr(mlp, name) for name in GATES)


def _key_width(attention: Any, queries: int) -> int:
    if any(hasattr(attention, name) for name in KEYS):
        return int(_part(attention, KEYS).out_features)
    return (int(_part(attention, FUSED).out_features) - queries) // 2


def _part(module: Any, names: Sequence[str]) -> Any:
    """Return the part of a module under the first of the names that it has."""
    return next(getattr(module, name) for name in names if hasattr(module, name))
