"""Refuse settings that the engine cannot honour, in one line, instead of giving silently wrong results."""

from __future__ import annotations

from typing import Any

from espalier.harness.cost.facts import StackFacts
from espalier.harness.errors import UserError
from espalier.methods.views import MethodError


def check_text_config(config: Any, where: str) -> None:
    """Refuse unlisted stacks with sliding-window or linear layers: their caches are not plain lists of keys.

    `where` is the start of the error line.

    Raises:
        UserError: names the first such layer.
    """
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if not kinds and window is not None and window < config.max_position_embeddings:
        kinds = ["sliding_attention"]  # of all layers, as in Mistral 7B v0.1
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            raise UserError(
                f"{where}: decoder layer {layer} is {kind!r}; such layers need a description of what they see or hold, "
                "as families with a file in harness/models have it; valid: full_attention"
            )


def check_full(text: StackFacts, layer: int) -> None:
    """Refuse to read the attention of a layer that has linear attention.

    Raises:
        MethodError: names the nearest layers that have scores.
    """
    if not text.is_linear(layer):
        return
    nearest = sorted(sorted(text.full_layers, key=lambda full: abs(full - layer))[:2])
    raise MethodError(
        f"decoder layer {layer} has linear attention, which gives tokens no scores, queries or keys; valid: a method "
        f"that reads other layers, the nearest {', '.join(map(str, nearest))} (one that reads the layer before its "
        f"site acts before {', '.join(str(full + 1) for full in nearest)})"
    )


def require_one_beam(beams: int) -> None:
    """Refuse beam search: beams swap rows between steps, and the attended entries of a row would not follow.

    Raises:
        UserError: there are several beams.
    """
    if beams > 1:
        raise UserError(
            f"generation.num_beams={beams} is not supported: this method chooses again at each step what is attended "
            "to, and beams swap rows between steps; valid: 1"
        )
