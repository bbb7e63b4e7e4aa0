"""`model.facts` against the model that was built: budgets and FLOPs are counted from facts, wrong ones falsify them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from harness.adapters.stacks import linear_widths, read_stack
from harness.errors import UserError
from harness.facts import StackFacts

if TYPE_CHECKING:
    from harness.engine.parts import Parts

#: Facts that a model cannot confirm, and why nothing is falsified by them.
UNCONFIRMED = {
    "signals": "what the family's code can produce; a method that reads a missing one is refused",
    "patch_tokens": "false only forbids methods inside the tower; true is refused where the family has no such blocks",
    "visual_tokens": "nominal where images are cut by their shape: a row counts its samples; of one grid, confirmed",
}

#: How towers name the embedding of a class token.
CLASS_TOKENS = ("class_embedding", "cls_token")


def check_facts(adapter: Parts) -> None:
    """Raise UserError unless an adapter's model is the one that its config file describes. Cost: no weight is read.

    The model may lie on the meta device. The line names the first fact that differs, its value and the model's.
    """
    for key, stated, found in _compared(adapter):
        if stated != found:
            conversion = adapter.spec.conversion
            hint = (
                ""
                if conversion is None
                else f"; the original release is converted by: {conversion}"
            )
            raise UserError(
                f"model={adapter.spec.name}: model.facts.{key}={_said(stated)}, the loaded model has "
                f"{_said(found)}{hint}"
            )
    if adapter.facts.patch_tokens:
        adapter.tower_blocks()
    if adapter.facts.class_attention == "probe":
        adapter.pooling_attention()


def _compared(adapter: Parts) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in the config file, value of the model) of every fact that the model can confirm."""
    facts, decoder = adapter.facts, adapter.decoder
    types = getattr(decoder.config, "layer_types", None) or ()
    sliding = sum("sliding" in kind for kind in types)
    # A stack without layers has no sizes to read.
    yield "text.layers", facts.text.layers, len(decoder.layers)
    yield from _stacks("text", _canonical(facts.text), read_stack(decoder.layers, sliding))
    unread = len(adapter.unread_blocks())
    layers = list(adapter.tower_layers())
    read = read_stack(layers[: len(layers) - unread], adapter.tower_windows())
    yield from _stacks("tower", facts.tower, read)
    stem = adapter.stem_layers()
    if bool(stem) != (facts.stem is not None):
        yield "stem", "stated" if facts.stem else None, "one" if stem else None
    if stem and facts.stem is not None:
        windows = sum(bool(layer.window_size) for layer in stem)
        yield from _stacks("stem", facts.stem, read_stack(stem, windows))
    for one in (adapter.projector, *adapter.deepstack().values()):
        yield "projector", facts.projector, linear_widths(one)
    yield "deepstack", facts.deepstack, tuple(adapter.deepstack())
    yield "vocabulary", facts.vocabulary, adapter.model.get_output_embeddings().weight.shape[0]
    yield "rotary_axes", facts.rotary_axes, _axes(decoder.config)
    has_token = any(name.endswith(CLASS_TOKENS) for name, _ in adapter.tower.named_parameters())
    substitute = "mean" if facts.class_attention == "token" else facts.class_attention
    yield "class_attention", facts.class_attention, "token" if has_token else substitute
    if (count := adapter.image_tokens()) is not None:
        yield "visual_tokens", facts.visual_tokens, count


def _stacks(name: str, stated: StackFacts, found: StackFacts) -> Iterator[tuple[str, Any, Any]]:
    for one in fields(StackFacts):
        yield f"{name}.{one.name}", getattr(stated, one.name), getattr(found, one.name)


def _canonical(text: StackFacts) -> StackFacts:
    """Return the facts of a stack scaled to its first layer, where there is no other MLP than that layer's own."""
    if text.layers > 1 or text.first_intermediate is None:
        return text
    return replace(text, intermediate=text.first_intermediate, first_intermediate=None, experts=0)


def _axes(config: Any) -> int:
    """Return the position axes of a decoder: three where rotary sections are dealt out to time, height and width."""
    sections = (getattr(config, "rope_parameters", None) or {}).get("mrope_section")
    return 1 if sections is None else len(sections)


def _said(value: Any) -> str:
    """Write a value the way a config file does."""
    if isinstance(value, tuple):
        return str(list(value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
