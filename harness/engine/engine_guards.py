"""Refuse settings that the engine cannot honour, in one line, instead of giving silently wrong results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, get_args

from espalier.harness.errors import Refused, UserError
from espalier.methods.views import MethodError, Where

if TYPE_CHECKING:
    from espalier.harness.cost.facts import ModelFacts, StackFacts

#: generate() arguments that break per-layer cache lengths, and why.
REFUSED: Mapping[str, str] = {
    "cache_implementation": "static, offloaded and quantised caches hold one length for all layers",
    "prefill_chunk_size": "a chunked prefill never has all visual tokens at once",
    "assistant_model": "assisted decoding rewinds a cache whose layers differ in length",
    "prompt_lookup_num_tokens": "assisted decoding rewinds a cache whose layers differ in length",
    "past_key_values": "a cache from an earlier turn reports the length of layer 0 only",
    "inputs_embeds": "visual positions are read from input_ids",
    "compile_config": "compiled graphs have fixed lengths",
}

#: generate() arguments with one value that the engine can honour, and why.
FIXED: Mapping[str, tuple[float, str]] = {
    "num_return_sequences": (1, "a sample has one answer"),
    "num_beam_groups": (1, "beam groups are code outside the library"),
    "diversity_penalty": (0, "beam groups are code outside the library"),
    "guidance_scale": (1, "guidance runs a second prompt between the steps"),
}


def check_generation(arguments: Mapping[str, Any]) -> None:
    """Refuse generate() arguments that the engine cannot honour.

    Raises:
        UserError: names the argument and the reason.
    """
    for name, reason in REFUSED.items():
        if arguments.get(name) is not None:
            raise UserError(f"generation.{name}={arguments[name]!r} is not supported: {reason}")
    for name, (only, reason) in FIXED.items():
        if arguments.get(name) not in (None, only):
            raise UserError(
                f"generation.{name}={arguments[name]!r} is not supported: {reason}; valid: {only}"
            )
    if arguments.get("use_cache") is False:
        raise UserError(
            "generation.use_cache=False is not supported: tokens are chosen once, at prefill; valid: True"
        )


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


def check_proved(facts: ModelFacts, who: str, places: Iterable[str]) -> None:
    """Refuse a method at kinds of site that a class without a file here was not proved for.

    Args:
        facts: of the model.
        who: the method, at the start of the error line.
        places: kinds of site where it acts.

    Raises:
        Refused: names the first such kind, why it was not proved, and the others.
    """
    for where in places:
        if where in facts.unproved:
            proved = [kind for kind in get_args(Where) if kind not in facts.unproved]
            raise Refused(
                f"{who} acts at {where}, and the model's class, which has no file here, was not proved there: "
                f"{facts.unproved[where]}; valid: a method that acts at {', '.join(proved)}"
            )


def no_emulation(name: str) -> str:
    """Return the line that refuses emulation on a model with linear attention."""
    return (
        "engine.backend='emulate' hides tokens by masks, and tokens hidden from linear attention still fade the "
        f"states of model={name!r}; valid: drop"
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
