"""Facts of a model measured on its modules, and their comparison with `model.facts`, on which budgets and FLOPs rest.

No function reads weights; a model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields, replace
from typing import Any

from torch import nn

from espalier.harness.cost.facts import (
    CanvasFacts,
    LinearFacts,
    ModelFacts,
    StackFacts,
    WideFacts,
)
from espalier.harness.engine.engine_guards import check_text_config
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.errors import UserError, foreign
from espalier.harness.models.adapter import Adapter
from espalier.harness.models.loader import MALFORMED, conversion_hint
from espalier.harness.specs.run_spec import ModelSpec

#: Names of the same parts in transformers' families.
ATTENTION = ("self_attn", "attention", "attn")
OUTPUT = ("o_proj", "out_proj", "projection_layer", "proj")
KEYS = ("k_proj",)
FUSED = ("qkv_proj", "qkv")
HEADS = ("num_attention_heads", "num_heads")
GATES = ("gate_proj", "gate_up_proj")
ROUTERS = ("gate", "router")
SHARED = ("shared_experts", "shared_expert")
SHARED_GATE = "shared_expert_gate"

#: The part of a decoder layer that replaces its attention.
LINEAR = "linear_attn"


def reading_parts(spec: ModelSpec, config: Any) -> AbstractContextManager[None]:
    """Return a context in which any error of reading a model's parts becomes one line.

    Args:
        spec: the model; its name is in the line.
        config: its configuration in the library.
    """
    decoder = getattr(getattr(config, "text_config", config), "model_type", None)
    return foreign(
        f"model={spec.name}: a {config.model_type} with the decoder {decoder!r} has parts that the engine cannot read",
        "a decoder of layers with attention and an MLP each, such as Llama's and Qwen's",
        MALFORMED,
    )


def read_stack(layers: Sequence[nn.Module], window_layers: int) -> StackFacts:
    """Return the facts of a stack in which only layer 0 may differ from the others, by the width of its MLP.

    Args:
        layers: the layers to count.
        window_layers: number of layers with window attention, which families store differently.
    """
    linear = _linear(layers)
    wide = None if linear is not None else _wide(layers)
    index = 0 if wide is not None else -1 if linear is None else linear.interval - 1
    attention = _part(layers[index], ATTENTION)
    output = _part(attention, OUTPUT)
    holder = attention if any(hasattr(attention, name) for name in HEADS) else attention.config
    heads = int(_part(holder, HEADS))
    head_dim = output.in_features // heads
    if any(hasattr(attention, name) for name in KEYS):
        key_width = _part(attention, KEYS).out_features
    else:
        key_width = (_part(attention, FUSED).out_features - output.in_features) // 2
    first, (width, gated, experts) = _mlp(layers[0]), _mlp(layers[-1])
    # An attention's configuration overrides its own attribute, as in the library.
    own_causal = getattr(attention, "is_causal", False)
    return StackFacts(
        layers=len(layers),
        hidden=output.out_features,
        intermediate=width,
        heads=heads,
        kv_heads=key_width // head_dim,
        head_dim=head_dim,
        gated=gated,
        causal=bool(getattr(getattr(attention, "config", None), "is_causal", own_causal)),
        window_layers=window_layers,
        first_intermediate=None if first == (width, gated, experts) else first[0],
        experts=experts,
        linear=linear,
        wide=wide,
    )


def _wide(layers: Sequence[Any]) -> WideFacts | None:
    """Return the heads of a stack's full layers where these have no map of values; None: all have one."""
    is_wide = [getattr(_part(layer, ATTENTION), "v_proj", True) is None for layer in layers]
    if not any(is_wide):
        return None
    first = is_wide.index(True)
    attention = _part(layers[first], ATTENTION)
    head_dim = int(attention.head_dim)
    return WideFacts(first + 1, _part(attention, KEYS).out_features // head_dim, head_dim)


def _linear(layers: Sequence[Any]) -> LinearFacts | None:
    """Return the facts of a stack's layers of linear attention; None if there are none.

    Raises:
        UserError: full layers are not evenly spaced.
    """
    is_linear = [hasattr(layer, LINEAR) for layer in layers]
    if not any(is_linear):
        return None
    part = getattr(layers[is_linear.index(True)], LINEAR)
    interval = is_linear.index(False) + 1 if not all(is_linear) else len(layers) + 1
    if is_linear != [bool((layer + 1) % interval) for layer in range(len(layers))]:
        raise UserError(
            f"the decoder's {len(layers)} layers are linear except "
            f"{', '.join(str(n) for n, linear in enumerate(is_linear) if not linear) or 'none'}; "
            "valid: every n-th layer is full, as in Qwen3.5 (config.json, full_attention_interval)"
        )
    heads = part.num_k_heads, part.num_v_heads
    return LinearFacts(interval, *heads, part.head_k_dim, part.head_v_dim)


def linear_widths(module: nn.Module) -> tuple[int, ...]:
    """Return the input width and all output widths of a module's linear layers, in order, or else of its matrix.

    A gate counts with the layer that it gates, keys and values with the queries.
    """
    maps = [
        part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and not name.endswith(("gate_proj", "k_proj", "v_proj"))
    ]
    if maps:
        return (maps[0].in_features, *(linear.out_features for linear in maps))
    matrices = [tuple(matrix.shape) for matrix in module.parameters() if matrix.dim() == 2]
    if not matrices:
        raise ValueError(f"{type(module).__name__} has no matrix")
    return matrices[0]


def _mlp(layer: Any) -> tuple[int, bool, int]:
    """Return the active width of a layer's MLP per token, whether it is gated, and the outputs of its router."""
    mlp = layer.mlp
    if hasattr(layer, "experts"):  # Gemma 4's are beside its MLP
        number, _, width = layer.experts.down_proj.shape
        return layer.router.config.top_k_experts * width + _down_width(mlp), _gated(mlp), number
    if not hasattr(mlp, "experts"):
        return _down_width(mlp), _gated(mlp), 0
    # One tensor holds all experts, Aria's transposed; the shared experts are one MLP.
    number, width = len(mlp.experts.down_proj), mlp.experts.intermediate_dim
    shared = sum(_down_width(getattr(mlp, name)) for name in SHARED if hasattr(mlp, name))
    experts = number + hasattr(mlp, SHARED_GATE)
    return _part(mlp, ROUTERS).top_k * width + shared, _gated(mlp.experts), experts


def _down_width(mlp: nn.Module) -> int:
    """Return the input width of the last linear layer."""
    return [part for part in mlp.modules() if isinstance(part, nn.Linear)][-1].in_features


def _gated(mlp: nn.Module) -> bool:
    return any(hasattr(part, name) for part in mlp.modules() for name in GATES)


def _part(module: Any, names: Sequence[str]) -> Any:
    """Return the attribute of a module under the first name that exists, without Gemma 4's clipping wrapper."""
    for name in names:
        if hasattr(module, name):
            part = getattr(module, name)
            return getattr(part, "linear", part)
    raise ValueError(f"{type(module).__name__} has no {' or '.join(names)}")


#: Facts that a model cannot confirm, and why a wrong value falsifies nothing.
UNCONFIRMED = {
    "unproved": "where a class without a file is not proved; such a kind of site is refused",
    "diffusion": "no configuration says that a model denoises; where it is stated, the stack is made to see both ways",
    "signals": "what the family's code can produce; a method that reads a missing one is refused",
    "patch_tokens": "false only forbids methods inside the tower; true is refused where the family has no such blocks",
    "visual_tokens": "nominal where images are cut by their shape: a row counts its samples; of one grid, confirmed",
    "nominal_work": "an estimate before a run; a row counts its samples",
}


def check_facts(adapter: Adapter) -> None:
    """Raise UserError unless an adapter's model matches its config file; the line names the first differing fact."""
    for key, stated, measured in _compared(adapter):
        if stated != measured:
            raise UserError(
                f"model={adapter.spec.name}: model.facts.{key}={_as_yaml(stated)}, the loaded model has "
                f"{_as_yaml(measured)}{conversion_hint(adapter.spec)}"
            )
    if adapter.facts.patch_tokens:
        adapter.tower_blocks()
    if adapter.facts.class_attention == "probe":
        adapter.pooling_attention()


def _compared(adapter: Adapter) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in the config file, measured value) of every fact that the model can confirm."""
    facts = adapter.facts
    # First, because a stack without layers has no other sizes.
    yield "text.layers", facts.text.layers, len(adapter.decoder.layers)
    measured = read_facts(adapter, facts)
    for field in fields(ModelFacts):
        stated, value = getattr(facts, field.name), getattr(measured, field.name)
        if isinstance(stated, StackFacts) and isinstance(value, StackFacts):
            if stated.layers == 1 and stated.first_intermediate is not None:
                # A stack scaled to its first layer has only that layer's MLP.
                width = stated.first_intermediate
                stated = replace(stated, intermediate=width, first_intermediate=None, experts=0)
            for part in fields(StackFacts):
                yield (
                    f"{field.name}.{part.name}",
                    getattr(stated, part.name),
                    getattr(value, part.name),
                )
        elif field.name == "stem":
            yield "stem", "stated" if stated else None, "one" if value else None
        else:
            yield field.name, stated, value
    for module in adapter.deepstack().values():
        yield "projector", facts.projector, linear_widths(module)


def _as_yaml(value: Any) -> str:
    """Return a value as a config file writes it."""
    if isinstance(value, tuple):
        return str(list(value))
    if value is None:
        return "null"
    if isinstance(value, LinearFacts | WideFacts | CanvasFacts):
        return f"{{{', '.join(f'{name}: {size}' for name, size in asdict(value).items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


#: Towers' names for the embedding of a class token.
CLASS_TOKENS = ("class_embedding", "cls_token")

#: Nominal visual tokens per image if the number depends on its shape: LLaVA-1.5's.
NOMINAL = 576


def unlisted_facts(adapter: Adapter) -> ModelFacts:
    """Return the facts of a model without a file in conf/model; what its modules do not show, its family states."""
    data, unproved = adapter.data, adapter.unproved
    return read_facts(
        adapter,
        replace(
            adapter.facts,
            visual_tokens=NOMINAL,
            signals=frozenset(SIGNALS) - set(data.lacking),
            patch_tokens=data.patch_tokens if not unproved else "tower" not in unproved,
            unproved=unproved,
        ),
    )


def read_facts(adapter: Adapter, facts: ModelFacts) -> ModelFacts:
    """Return the facts of an adapter's model; what it cannot confirm (UNCONFIRMED) is taken from `facts`."""
    config = adapter.decoder.config
    types = getattr(config, "layer_types", None) or ()
    text = read_stack(adapter.decoder.layers, sum("sliding" in layer_type for layer_type in types))
    if adapter.layer_types is None and text.linear is None:
        check_text_config(config, f"model={adapter.spec.name}")
    sections = (getattr(config, "rope_parameters", None) or {}).get("mrope_section")
    facts = replace(
        facts,
        text=text,
        vocabulary=int(adapter.model.get_output_embeddings().weight.shape[0]),
        rotary_axes=1 if sections is None else len(sections),
    )
    if "tower" in facts.unproved:
        return facts
    layers, stem = list(adapter.tower_layers()), adapter.stem_layers()
    windows = sum(bool(getattr(layer, "window_size", 0)) for layer in stem)
    names = [name for name, _ in adapter.tower.named_parameters()]
    substitute = "mean" if facts.class_attention == "token" else facts.class_attention
    facts = replace(
        facts,
        # Up to the layer that the projector reads.
        tower=read_stack(
            layers[: len(layers) - len(adapter.unread_blocks())], adapter.tower_windows()
        ),
        class_attention="token" if any(n.endswith(CLASS_TOKENS) for n in names) else substitute,
    )
    if facts.unproved:
        return facts
    return replace(
        facts,
        stem=read_stack(stem, windows) if stem else None,
        stem_joins=adapter.stem_joins(),
        projector=linear_widths(adapter.projector),
        gated_projector=_gated(adapter.projector),
        deepstack=tuple(adapter.deepstack()),
        canvas=adapter.canvas_facts,
        visual_tokens=adapter.image_tokens() or facts.visual_tokens,
    )
