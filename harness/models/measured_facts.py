"""The facts of a model read off the model itself, weights or none: what `model.facts` states for one of conf/model."""

from __future__ import annotations

from espalier.harness.cost.facts import ModelFacts, StackFacts
from espalier.harness.engine.model_parts import Parts
from espalier.harness.models.stack_sizes import linear_widths, read_stack
from espalier.methods.signals import SIGNALS

#: How towers name the embedding of a class token.
CLASS_TOKENS = ("class_embedding", "cls_token")

#: Visual tokens that stand for one image where their number follows its shape: LLaVA-1.5's.
NOMINAL = 576


def read_facts(adapter: Parts, lacking: tuple[str, ...], patch_tokens: bool) -> ModelFacts:
    """Return the facts of an adapter's model. Cost: no weight is read; the model may lie on the meta device.

    Args:
        adapter: around the model; its own facts are not looked at.
        lacking: signals that the family's code cannot produce.
        patch_tokens: whether the family's visual tokens are the tower's patches one to one.
    """
    return ModelFacts(
        text=text_stack(adapter),
        tower=tower_stack(adapter),
        stem=stem_stack(adapter),
        projector=projector_widths(adapter),
        vocabulary=vocabulary(adapter),
        visual_tokens=adapter.image_tokens() or NOMINAL,
        class_attention="token" if has_class_token(adapter) else "mean",
        rotary_axes=rotary_axes(adapter),
        signals=frozenset(SIGNALS) - set(lacking),
        patch_tokens=patch_tokens,
        deepstack=tuple(adapter.deepstack()),
    )


def text_stack(adapter: Parts) -> StackFacts:
    """Return the sizes of the decoder."""
    types = getattr(adapter.decoder.config, "layer_types", None) or ()
    return read_stack(adapter.decoder.layers, sum("sliding" in layer_type for layer_type in types))


def tower_stack(adapter: Parts) -> StackFacts:
    """Return the sizes of the vision tower up to the layer that the projector reads."""
    layers = list(adapter.tower_layers())
    return read_stack(layers[: len(layers) - len(adapter.unread_blocks())], adapter.tower_windows())


def stem_stack(adapter: Parts) -> StackFacts | None:
    """Return the sizes of what runs before the tower; None without such a stack."""
    stem = adapter.stem_layers()
    if not stem:
        return None
    return read_stack(stem, sum(bool(layer.window_size) for layer in stem))


def projector_widths(adapter: Parts) -> tuple[int, ...]:
    """Return the widths of the projector's linear maps."""
    return linear_widths(adapter.projector)


def vocabulary(adapter: Parts) -> int:
    """Return the rows of the output head."""
    return int(adapter.model.get_output_embeddings().weight.shape[0])


def rotary_axes(adapter: Parts) -> int:
    """Return the decoder's position axes: three where rotary sections are dealt out to time, height and width."""
    parameters = getattr(adapter.decoder.config, "rope_parameters", None) or {}
    sections = parameters.get("mrope_section")
    return 1 if sections is None else len(sections)


def has_class_token(adapter: Parts) -> bool:
    """Say whether the tower has one."""
    return any(name.endswith(CLASS_TOKENS) for name, _ in adapter.tower.named_parameters())
