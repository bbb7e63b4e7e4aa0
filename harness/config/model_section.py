"""The section `model` of a composed config becomes a ModelSpec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from espalier.harness.config.prompt_section import apply_prompt_set
from espalier.harness.cost.facts import ModelFacts, read_facts
from espalier.harness.engine.signals.table import SIGNALS
from espalier.harness.errors import UserError
from espalier.harness.settings import (
    Count,
    OneOf,
    defaults,
    gather,
    key_mistakes,
    read_fields,
    read_value,
    setting_hints,
    table,
)
from espalier.harness.specs.generation import unescaped
from espalier.harness.specs.run_spec import MODEL_KEYS, ModelSpec, VideoSpec


def model_spec(part: Mapping[str, Any], tasks: Iterable[str] = ()) -> ModelSpec:
    """Return the model of a composed section `model`, with the settings of its prompt set.

    `tasks` are kind and name of the benchmark, for which a prompt set may have settings.

    Raises:
        UserError: one line with every config key that is wrong, the value and what is valid.
    """
    gather({}, key_mistakes("model", part, MODEL_KEYS))
    part, prompt = apply_prompt_set(part, tasks)
    part["video"] = defaults(VideoSpec) | table("model.video", part["video"])
    values = read_fields(
        ModelSpec, "model", {name: part[name] for name in setting_hints(ModelSpec)}
    )
    if values["path"] is None and values["hub"] is None and values["weights"] == "trained":
        raise UserError("model.path=None and model.hub=None: one of the two must be set")
    random = values["weights"] == "random"
    if random:
        # Such a model is always built on one device.
        values["device_map"] = None
    _check_spread(values)
    values["generation"] = unescaped(values["generation"])
    return ModelSpec(
        **values,
        facts=_scaled(_facts(table("model.facts", part["facts"])), part["scale"], random),
        prompt=prompt,
    )


def _check_spread(values: Mapping[str, Any]) -> None:
    """Raise UserError for settings that need a model on several devices where it is on one."""
    if values["device_map"] is not None:
        return
    if values["offload"]:
        raise UserError("model.offload=True needs model.device_map=auto; valid: false, or both")
    if values["max_memory"]:
        raise UserError(
            "model.max_memory needs model.device_map=auto; a model on one device takes what it needs"
        )


def _scaled(facts: ModelFacts, scale: Any, random: bool) -> ModelFacts:
    """Return the facts with the number of layers that `model.scale` sets, which only random weights can have."""
    key, part = "model.scale", table("model.scale", scale)
    names = ("layers", "tower_layers")
    sizes = gather(
        {name: (f"{key}.{name}", part[name], Count | None) for name in names if name in part},
        key_mistakes(key, part, names),
    )
    for name, size in sizes.items():
        if size is not None and not random:
            raise UserError(
                f"{key}.{name}={size} needs model.weights=random: a checkpoint has its own size"
            )
    return facts.scaled(sizes["layers"], sizes["tower_layers"])


def _facts(part: Mapping[str, Any]) -> ModelFacts:
    """Return the facts; `signals` are all where none are listed, less those of `lacking`."""
    key, signals = "model.facts", tuple[Annotated[str, OneOf(tuple(SIGNALS))], ...]
    part = dict(part)
    lacking = read_value(f"{key}.lacking", part.pop("lacking", ()), signals)
    listed = read_value(f"{key}.signals", part.get("signals") or sorted(SIGNALS), signals)
    part["signals"] = [signal for signal in listed if signal not in lacking]
    return read_facts(key, part)
