"""`model.facts` against the model that was built: budgets and FLOPs are counted from facts, wrong ones falsify them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from espalier.harness.cost.facts import StackFacts
from espalier.harness.errors import UserError
from espalier.harness.models.measured_facts import (
    has_class_token,
    rotary_axes,
    stem_stack,
    text_stack,
    tower_stack,
    vocabulary,
)
from espalier.harness.models.stack_sizes import linear_widths

if TYPE_CHECKING:
    from espalier.harness.engine.model_parts import Parts

#: Facts that a model cannot confirm, and why nothing is falsified by them.
UNCONFIRMED = {
    "diffusion": "no configuration says that a model denoises; where it is stated, the stack is made to see both ways",
    "signals": "what the family's code can produce; a method that reads a missing one is refused",
    "patch_tokens": "false only forbids methods inside the tower; true is refused where the family has no such blocks",
    "visual_tokens": "nominal where images are cut by their shape: a row counts its samples; of one grid, confirmed",
}


def check_facts(adapter: Parts) -> None:
    """Raise UserError unless an adapter's model is the one that its config file describes. Cost: no weight is read.

    The model may lie on the meta device. The line names the first fact that differs, its value and the model's.
    """
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


def _compared(adapter: Parts) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value in the config file, value of the model) of every fact that the model can confirm."""
    facts = adapter.facts
    # A stack without layers has no sizes to read.
    yield "text.layers", facts.text.layers, len(adapter.decoder.layers)
    yield from _stacks("text", _canonical(facts.text), text_stack(adapter))
    yield from _stacks("tower", facts.tower, tower_stack(adapter))
    stem = stem_stack(adapter)
    if (stem is None) != (facts.stem is None):
        yield "stem", "stated" if facts.stem else None, "one" if stem else None
    if stem is not None and facts.stem is not None:
        yield from _stacks("stem", facts.stem, stem)
    for module in (adapter.projector, *adapter.deepstack().values()):
        yield "projector", facts.projector, linear_widths(module)
    yield "deepstack", facts.deepstack, tuple(adapter.deepstack())
    yield "vocabulary", facts.vocabulary, vocabulary(adapter)
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
    """Return the facts of a stack scaled to its first layer, where there is no other MLP than that layer's own."""
    if text.layers > 1 or text.first_intermediate is None:
        return text
    return replace(text, intermediate=text.first_intermediate, first_intermediate=None, experts=0)


def _as_yaml(value: Any) -> str:
    """Write a value the way a config file does."""
    if isinstance(value, tuple):
        return str(list(value))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
