"""What a method adds to a row's key and name, for every kind alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from espalier.harness.kinds.kind import Identity
from espalier.harness.specs.labels import label
from espalier.harness.specs.run_spec import Asked, EngineSpec, ModelSpec
from espalier.methods.base import Method

#: Settings of the engine that make a difference to some kind, in the order of a row.
CONCERNING = (
    *("backend", "batch_size", "positions", "separators", "decode", "rescore"),
    *("transport", "compare", "graphs"),
)


def identity_of(
    asked: Asked, method: Method, concerning: Mapping[str, Any], draft: ModelSpec | None = None
) -> Identity:
    """Return the identity of a method.

    Args:
        asked: what it runs under.
        method: the method.
        concerning: values of those settings of the engine that make a difference to it.
        draft: the model that drafts.
    """
    return Identity(
        methods=method.parts,
        params=params_of(method),
        engine={name: concerning.get(name) for name in CONCERNING},
        draft=draft,
        label=label(method, asked.method.variant, asked.budget),
    )


def params_of(method: Method) -> dict[str, Any]:
    """Return the hyper-parameters of a method; of a composition those of each part by its class, beside its own."""
    if len(method.parts) == 1:
        return asdict(method)
    values = ((field.name, getattr(method, field.name)) for field in fields(method))
    own = {name: value for name, value in values if value not in method.parts}
    return {**{type(part).__qualname__: asdict(part) for part in method.parts}, **own}


def separators_of(engine: EngineSpec) -> str | None:
    """Return what a row says of separators; null where they stay, as in rows that do not know the setting."""
    return None if engine.separators == "keep" else engine.separators


def answering_settings(engine: EngineSpec, acts: bool) -> dict[str, Any]:
    """Return the settings that concern answers of one model.

    Args:
        engine: all settings.
        acts: whether tokens leave the prompt; otherwise there are no gaps and no policy for them.
    """
    return {
        "backend": engine.backend,
        # What `auto` finds depends on the machine; greedy answers do not depend on the batch.
        "batch_size": engine.batch_size,
        "positions": engine.positions if acts else None,
        "separators": separators_of(engine),
        "decode": engine.decode,
        "rescore": engine.rescore,
    }
