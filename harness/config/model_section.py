"""The section `model` of a composed config becomes a ModelSpec."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from espalier.harness.config.prompt_section import settled
from espalier.harness.cost.facts import CLASS_ATTENTION, ModelFacts
from espalier.harness.errors import UserError
from espalier.harness.media.images import TRANSPARENCY
from espalier.harness.paths import rooted
from espalier.harness.specs import value_checks as fields
from espalier.harness.specs.run_spec import (
    ATTENTIONS,
    BOXES,
    DEVICE_MAPS,
    DEVICES,
    DTYPES,
    MEDIA,
    SHORT_VIDEOS,
    VIDEO_RULES,
    WEIGHTS,
    ModelSpec,
    VideoSpec,
)
from espalier.methods.signals import SIGNALS


def model_spec(part: Mapping[str, Any], tasks: Iterable[str] = ()) -> ModelSpec:
    """Return the model of a composed section `model`, with what its prompt set says.

    `tasks` are kind and name of the benchmark, of which a set may say something of its own.

    Raises:
        UserError: one line with the config key, the value and what is valid.
    """
    part, prompt = settled(part, tasks)
    path = fields.optional_text("model.path", part["path"])
    hub = fields.optional_text("model.hub", part["hub"])
    weights = fields.choice("model.weights", part["weights"], WEIGHTS)
    if path is None and hub is None and weights == "trained":
        raise UserError("model.path=None and model.hub=None: one of the two must be set")
    dtype = fields.choice("model.dtype", part["dtype"], DTYPES)
    device_map = _device_map(part["device_map"], weights)
    return ModelSpec(
        name=fields.text("model.name", part["name"]),
        adapter=fields.text("model.adapter", part["adapter"]),
        path=None if path is None else rooted(path),
        hub=hub,
        revision=fields.optional_text("model.revision", part["revision"]),
        dtype=dtype,
        attention=fields.choice("model.attention", part["attention"], ATTENTIONS),
        weights=weights,
        device=_device(part["device"]),
        device_map=device_map,
        offload=_offload(part["offload"], device_map),
        max_memory=_max_memory(fields.table("model.max_memory", part["max_memory"]), device_map),
        facts=_scaled(_facts(fields.table("model.facts", part["facts"])), part["scale"], weights),
        check_weights=_check_weights(part["check_weights"]),
        template=fields.optional_text("model.template", part["template"]),
        conversation=fields.optional_text("model.conversation", part["conversation"]),
        conversion=fields.optional_text("model.conversion", part["conversion"]),
        generation=fields.table("model.generation", part["generation"]),
        processor=fields.table("model.processor", part["processor"]),
        video=_video(fields.table("model.video", part["video"])),
        transparency=fields.choice("model.transparency", part["transparency"], TRANSPARENCY),
        media=fields.choice("model.media", part["media"], MEDIA),
        architecture=fields.table("model.architecture", part["architecture"]),
        drafts=fields.names("model.drafts", part["drafts"], empty=True),
        boxes=fields.choice("model.boxes", part["boxes"], BOXES),
        prompt=prompt,
        template_sha256=fields.optional_text("model.template_sha256", part["template_sha256"]),
    )


def _video(part: dict[str, Any]) -> VideoSpec:
    fields.only_some("model.video", part, [field.name for field in dataclasses.fields(VideoSpec)])
    part = asdict(VideoSpec()) | part
    return VideoSpec(
        frames=fields.integer("model.video.frames", part["frames"], at_least=1),
        rule=fields.choice("model.video.rule", part["rule"], VIDEO_RULES),
        short=fields.choice("model.video.short", part["short"], SHORT_VIDEOS),
        rate=fields.positive("model.video.rate", part["rate"]),
    )


def _device_map(value: Any, weights: str) -> str | None:
    device_map = fields.optional_text("model.device_map", value)
    if device_map is None:
        return None
    fields.choice("model.device_map", device_map, DEVICE_MAPS)
    return None if weights == "random" else device_map


def _offload(value: Any, device_map: str | None) -> bool:
    offload = fields.flag("model.offload", value)
    if offload and device_map is None:
        raise UserError("model.offload=True needs model.device_map=auto; valid: false, or both")
    return offload


def _max_memory(part: Mapping[str, Any], device_map: str | None) -> dict[str, int]:
    if part and device_map is None:
        raise UserError(
            "model.max_memory needs model.device_map=auto; a model on one device takes what it needs"
        )
    for place in part:
        if place != "cpu" and not place.isdecimal():
            raise UserError(
                f"model.max_memory.{place}: no such place; valid: the number of a card, cpu"
            )
    return {place: fields.size(f"model.max_memory.{place}", size) for place, size in part.items()}


def _check_weights(value: Any) -> bool | None:
    if value != "auto" and not isinstance(value, bool):
        raise UserError(f"model.check_weights={value!r} is unknown; valid: auto, true, false")
    return None if value == "auto" else bool(value)


def _scaled(facts: ModelFacts, scale: Any, weights: str) -> ModelFacts:
    part = fields.table("model.scale", scale)
    fields.only_known("model.scale", part, ("layers", "tower_layers"))
    sizes = {
        name: fields.optional_integer(f"model.scale.{name}", part[name], at_least=1)
        for name in part
    }
    for name, size in sizes.items():
        if size is not None and weights != "random":
            raise UserError(
                f"model.scale.{name}={size} needs model.weights=random: a checkpoint has its own size"
            )
    return facts.scaled(sizes["layers"], sizes["tower_layers"])


def _facts(part: dict[str, Any]) -> ModelFacts:
    part = dict(part)
    widths = part.get("projector", ())
    if not isinstance(widths, list | tuple):
        raise UserError(f"model.facts.projector={widths!r} must be a list of widths")
    for width in widths:
        fields.integer("model.facts.projector", width, at_least=1)
    lacking = fields.names("model.facts.lacking", part.pop("lacking", ()), empty=True)
    part["signals"] = part.get("signals") or sorted(SIGNALS)
    for key, named in (("lacking", lacking), ("signals", part["signals"])):
        for signal in fields.names(f"model.facts.{key}", named, empty=True):
            fields.choice(f"model.facts.{key}", signal, SIGNALS)
    part["signals"] = [signal for signal in part["signals"] if signal not in lacking]
    try:
        facts = ModelFacts.from_config(part)
    except (KeyError, TypeError) as error:
        raise UserError(f"model.facts does not describe a model: {error}") from error
    for stack in ("text", "tower", "stem"):
        for name, value in (part.get(stack) or {}).items():
            key = f"model.facts.{stack}.{name}"
            if name in ("gated", "causal"):
                fields.flag(key, value)
            elif name == "first_intermediate":
                fields.optional_integer(key, value, at_least=1)
            else:
                fields.integer(
                    key, value, at_least=0 if name in ("experts", "window_layers") else 1
                )
    for name in ("vocabulary", "visual_tokens", "rotary_axes"):
        fields.integer(f"model.facts.{name}", part[name], at_least=1)
    for layer in part.get("deepstack", ()):
        fields.integer("model.facts.deepstack", layer, at_least=0)
    _check_diffusion(facts)
    fields.flag("model.facts.patch_tokens", part.get("patch_tokens", False))
    fields.choice("model.facts.class_attention", part["class_attention"], CLASS_ATTENTION)
    return facts


def _check_diffusion(facts: ModelFacts) -> None:
    """Raise UserError unless what denoises sees both ways, and names tokens that it has."""
    key, own = "model.facts.diffusion", facts.diffusion
    if (own is None) != facts.text.causal:
        raise UserError(
            f"model.facts.text.causal={str(facts.text.causal).lower()} with {key}={'null' if own is None else 'set'}: "
            "a model that denoises sees both ways, and no other does; valid: leave causal out"
        )
    if own is None:
        return
    fields.flag(f"{key}.prefix_cache", own.prefix_cache)
    named = {"mask_id": (own.mask_id,), "end_ids": own.end_ids, "forbidden_ids": own.forbidden_ids}
    for name, ids in named.items():
        for number in ids:
            if fields.integer(f"{key}.{name}", number, at_least=0) >= facts.vocabulary:
                raise UserError(
                    f"{key}.{name}={number} is no token; valid: 0 to {facts.vocabulary - 1} (model.facts.vocabulary)"
                )


def _device(value: Any) -> str:
    name, _, index = str(value).partition(":")
    if name not in DEVICES or (index and not (name == "cuda" and index.isdecimal())):
        raise UserError(f"model.device={value!r} is unknown; valid: auto, cpu, cuda, cuda:<index>")
    if name == "cpu":
        return "cpu"
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    present = torch.cuda.device_count()
    if int(index or 0) >= present:
        raise UserError(
            f"model.device={value!r}: this machine has {present} CUDA devices; valid: auto, cpu"
        )
    return str(value)
