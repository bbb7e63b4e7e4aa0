"""The part of a row's key and name that depends on the method, for every kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from espalier.harness.kinds.kind import Identity
from espalier.harness.settings import BY_METHOD, marked
from espalier.harness.specs.labels import label
from espalier.harness.specs.run_spec import AnswerRequest, EngineSpec, ModelSpec
from espalier.methods.base import Method


def identity_of(
    spec: AnswerRequest,
    method: Method,
    concerning: Mapping[str, Any],
    draft: ModelSpec | None = None,
) -> Identity:
    """Return the identity of a method.

    Args:
        spec: the run.
        method: the method.
        concerning: the engine settings that change its numbers.
        draft: the model that drafts.
    """
    return Identity(
        methods=method.parts,
        params=params_of(method),
        engine={name: concerning.get(name) for name in marked(EngineSpec, BY_METHOD)},
        draft=draft,
        label=label(method, spec.method.variant, spec.method.variants, spec.budget),
    )


def params_of(method: Method) -> dict[str, Any]:
    """Return the hyper-parameters of a method; of a composition its own, and those of each part by class name."""
    if len(method.parts) == 1:
        return asdict(method)
    values = ((field.name, getattr(method, field.name)) for field in fields(method))
    values_of_both = {name: value for name, value in values if value not in method.parts}
    return {**{type(part).__qualname__: asdict(part) for part in method.parts}, **values_of_both}


def separators_of(engine: EngineSpec) -> str | None:
    """Return the setting of separators in a row; null where they stay, as in rows older than the setting."""
    return None if engine.separators == "keep" else engine.separators


def answering_settings(engine: EngineSpec, acts: bool) -> dict[str, Any]:
    """Return the settings that change answers of one model.

    Args:
        engine: all engine settings.
        acts: whether tokens leave the prompt; otherwise no policy for gaps applies.
    """
    return {
        "backend": engine.backend,
        # The size that `auto` finds depends on the machine; greedy answers do not depend on the batch.
        "batch_size": engine.batch_size,
        "positions": engine.positions if acts else None,
        "separators": separators_of(engine),
        "decode": engine.decode,
        "rescore": engine.rescore,
    }
