"""Facts of a model measured on its modules, and their comparison with `model.facts`, on which budgets and FLOPs rest.

No function reads weights; a model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from espalier.harness.cost.facts import (
    CanvasFacts,
    LinearFacts,
    ModelFacts,
    StackFacts,
    WideFacts,
)
from espalier.harness.engine.engine_guards import check_text_config
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.errors import UserError, foreign
from espalier.harness.models.loader import MALFORMED
from espalier.methods.signals import SIGNALS

if TYPE_CHECKING:
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
    heads = _first(
        (
            int(getattr(place, name))
            for place in (attention, getattr(attention, "config", None))
            for name in HEADS
            if hasattr(place, name)
        ),
        f"{type(attention).__name__} has no number of heads",
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


def _causal(attention: Any) -> bool:
    """Return whether an attention is causal; its configuration overrides its own attribute, as in the library."""
    default = getattr(attention, "is_causal", False)
    return bool(getattr(getattr(attention, "config", None), "is_causal", default))


def linear_widths(module: nn.Module) -> tuple[int, ...]:
    """Return the input width and all output widths of a module's linear layers, in order, or else of its matrix.

    A gate counts with the layer that it gates, keys and values with the queries.
    """
    maps = [
        part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and not name.endswith(("gate_proj", "k_proj", "v_proj"))
    ]
    if not maps:
        matrices = (tuple(matrix.shape) for matrix in module.parameters() if matrix.dim() == 2)
        shape: tuple[int, ...] = _first(matrices, f"{type(module).__name__} has no matrix")
        return shape
    return (maps[0].in_features, *(linear.out_features for linear in maps))


@dataclass(frozen=True)
class _Mlp:
    """The MLP of a layer: active width per token, whether it is gated, and the outputs of its router."""

    width: int
    gated: bool
    experts: int


def _mlp(layer: Any) -> _Mlp:
    mlp = layer.mlp
    if hasattr(layer, "experts"):  # Gemma 4's are beside its MLP
        number, _, width = layer.experts.down_proj.shape
        return _Mlp(
            layer.router.config.top_k_experts * width + _down_width(mlp), _gated(mlp), number
        )
    if not hasattr(mlp, "experts"):
        return _Mlp(_down_width(mlp), _gated(mlp), 0)
    # One tensor holds all experts, Aria's transposed; the shared experts are one MLP.
    number, width = len(mlp.experts.down_proj), mlp.experts.intermediate_dim
    routed = _part(mlp, ROUTERS).top_k * width
    shared = sum(_down_width(getattr(mlp, name)) for name in SHARED if hasattr(mlp, name))
    return _Mlp(routed + shared, _gated(mlp.experts), number + hasattr(mlp, SHARED_GATE))


def _down_width(mlp: nn.Module) -> int:
    """Return the input width of the last linear layer."""
    return [part for part in mlp.modules() if isinstance(part, nn.Linear)][-1].in_features


def _gated(mlp: nn.Module) -> bool:
    return any(hasattr(part, name) for part in mlp.modules() for name in GATES)


def _key_width(attention: Any, queries: int) -> int:
    if any(hasattr(attention, name) for name in KEYS):
        return int(_part(attention, KEYS).out_features)
    return (int(_part(attention, FUSED).out_features) - queries) // 2


def _part(module: Any, names: Sequence[str]) -> Any:
    """Return the attribute of a module under the first name that exists, without Gemma 4's clipping wrapper."""
    present = (getattr(module, name) for name in names if hasattr(module, name))
    part = _first(present, f"{type(module).__name__} has no {' or '.join(names)}")
    return getattr(part, "linear", part)


def _first(values: Iterable[Any], problem: str) -> Any:
    for value in values:
        return value
    raise ValueError(problem)


#: Facts that a model cannot confirm, and why a wrong value falsifies nothing.
UNCONFIRMED = {
    "unproved": "where a class without a file is not proved; such a kind of site is refused",
    "diffusion": "no configuration says that a model denoises; where it is stated, the stack is made to see both ways",
    "signals": "what the family's code can produce; a method that reads a missing one is refused",
    "patch_tokens": "false only forbids methods inside the tower; true is refused where the family has no such blocks",
    "visual_tokens": "nominal where images are cut by their shape: a row counts its samples; of one grid, confirmed",
    "nominal_work": "an estimate before a run; a row counts its samples",
}


def check_facts(adapter: ModelParts) -> None:
    """Raise UserError unless an adapter's model matches its config file; the line names the first differing fact."""
    for key, stated, measured in _compared(adapter):
        if stated != measured:
            conversion = adapter.spec.conversion
            hint = (
                ""
                if conversion is None
                else f"; the original release is converted by: {conversion}"
            )
            raise UserError(
                f"model={adapter.spec.name}: model.facts.{key}={_as_yaml(stated)}, the loaded model has "
                f"{_as_yaml(measured)}{hint}"
            )
    if adapter.facts.patch_tokens:
        adapter.tower_blocks()
    if adapter.facts.class_attention == "probe":
        adapter.pooling_attention()


def _compared(adapter: ModelParts) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in the config file, measured value) of every fact that the model can confirm."""
    facts = adapter.facts
    # First, because a stack without layers has no other sizes.
    yield "text.layers", facts.text.layers, len(adapter.decoder.layers)
    yield from _stacks("text", _canonical(facts.text), text_stack(adapter))
    if facts.unproved:
        yield "vocabulary", facts.vocabulary, vocabulary(adapter)
        yield "rotary_axes", facts.rotary_axes, rotary_axes(adapter)
        return
    yield from _stacks("tower", facts.tower, tower_stack(adapter))
    stem = stem_stack(adapter)
    if (stem is None) != (facts.stem is None):
        yield "stem", "stated" if facts.stem else None, "one" if stem else None
    if stem is not None and facts.stem is not None:
        yield from _stacks("stem", facts.stem, stem)
    yield "stem_joins", facts.stem_joins, adapter.stem_joins()
    for module in (adapter.projector, *adapter.deepstack().values()):
        yield "projector", facts.projector, linear_widths(module)
    yield "gated_projector", facts.gated_projector, _gated(adapter.projector)
    yield "deepstack", facts.deepstack, tuple(adapter.deepstack())
    yield "vocabulary", facts.vocabulary, vocabulary(adapter)
    yield "canvas", facts.canvas, adapter.canvas_facts
    yield "rotary_axes", facts.rotary_axes, rotary_axes(adapter)
    has_token = has_class_token(adapter)
    substitute = "mean" if facts.class_attention == "token" else facts.class_attention
    yield "class_attention", facts.class_attention, "token" if has_token else substitute
    if (count := adapter.image_tokens()) is not None:
        yield "visual_tokens", facts.visual_tokens, count


def _stacks(name: str, stated: StackFacts, measured: StackFacts) -> Iterator[tuple[str, Any, Any]]:
    for field in fields(StackFacts):
        yield f"{name}.{field.name}", getattr(stated, field.name), getattr(measured, field.name)


def _canonical(text: StackFacts) -> StackFacts:
    """Return the facts of a stack; one scaled to its first layer has only that layer's MLP."""
    if text.layers > 1 or text.first_intermediate is None:
        return text
    return replace(text, intermediate=text.first_intermediate, first_intermediate=None, experts=0)


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


#: What stands for the stacks before the decoder where they are unknown; nothing is computed from it.
UNKNOWN = StackFacts(1, 1, 1, 1, 1, 1, gated=False, causal=False)


def read_facts(
    adapter: ModelParts,
    lacking: tuple[str, ...],
    patch_tokens: bool,
    unproved: Mapping[str, str] | None = None,
) -> ModelFacts:
    """Return the facts of an adapter's model.

    Args:
        adapter: adapter of the model; its `facts` are not read.
        lacking: signals that the family's code cannot produce.
        patch_tokens: whether each visual token is one patch of the tower.
        unproved: kinds of site where methods may not act, and why; empty: none. Otherwise facts begin at the decoder,
            with the tower's layers where methods may act inside it.
    """
    if unproved:
        in_tower = "tower" not in unproved
        return ModelFacts(
            text=text_stack(adapter),
            tower=tower_stack(adapter) if in_tower else UNKNOWN,
            stem=None,
            projector=(1, 1),
            vocabulary=vocabulary(adapter),
            visual_tokens=NOMINAL,
            class_attention="token" if in_tower and has_class_token(adapter) else "mean",
            rotary_axes=rotary_axes(adapter),
            signals=frozenset(SIGNALS) - set(lacking),
            patch_tokens=in_tower,
            unproved=unproved,
        )
    return ModelFacts(
        text=text_stack(adapter),
        tower=tower_stack(adapter),
        stem=stem_stack(adapter),
        projector=projector_widths(adapter),
        gated_projector=_gated(adapter.projector),
        stem_joins=adapter.stem_joins(),
        vocabulary=vocabulary(adapter),
        visual_tokens=adapter.image_tokens() or NOMINAL,
        class_attention="token" if has_class_token(adapter) else "mean",
        rotary_axes=rotary_axes(adapter),
        signals=frozenset(SIGNALS) - set(lacking),
        patch_tokens=patch_tokens,
        deepstack=tuple(adapter.deepstack()),
        canvas=adapter.canvas_facts,
    )


def text_stack(adapter: ModelParts) -> StackFacts:
    """Return the sizes of the decoder."""
    config = adapter.decoder.config
    types = getattr(config, "layer_types", None) or ()
    stack = read_stack(adapter.decoder.layers, sum("sliding" in layer_type for layer_type in types))
    if adapter.layer_types is None and stack.linear is None:
        check_text_config(config, f"model={adapter.spec.name}")
    return stack


def tower_stack(adapter: ModelParts) -> StackFacts:
    """Return the sizes of the vision tower, up to the layer that the projector reads."""
    layers = list(adapter.tower_layers())
    return read_stack(layers[: len(layers) - len(adapter.unread_blocks())], adapter.tower_windows())


def stem_stack(adapter: ModelParts) -> StackFacts | None:
    """Return the sizes of the stack before the tower; None if there is none."""
    stem = adapter.stem_layers()
    if not stem:
        return None
    return read_stack(stem, sum(bool(getattr(layer, "window_size", 0)) for layer in stem))


def projector_widths(adapter: ModelParts) -> tuple[int, ...]:
    """Return the widths of the projector's linear layers."""
    return linear_widths(adapter.projector)


def vocabulary(adapter: ModelParts) -> int:
    """Return the rows of the output head."""
    return int(adapter.model.get_output_embeddings().weight.shape[0])


def rotary_axes(adapter: ModelParts) -> int:
    """Return the number of the decoder's position axes: that of its rotary sections."""
    parameters = getattr(adapter.decoder.config, "rope_parameters", None) or {}
    sections = parameters.get("mrope_section")
    return 1 if sections is None else len(sections)


def has_class_token(adapter: ModelParts) -> bool:
    """Return whether the tower has a class token."""
    return any(name.endswith(CLASS_TOKENS) for name, _ in adapter.tower.named_parameters())
