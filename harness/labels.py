"""What tells configurations of one method apart, in the names of curves and lines of tables."""

from __future__ import annotations

from dataclasses import MISSING, fields

from harness.budget import Budget
from harness.catalogue import build_method
from harness.specs import RunSpec
from methods.base import Method


def label_of(spec: RunSpec) -> str:
    """Return the label of a run by its config: what is fitted to a model, such as a schedule, is no setting."""
    method = build_method(spec.method.name, spec.method.params)
    return label(method, spec.method.variant, spec.budget)


def label(method: Method, variant: str, budget: Budget) -> str:
    """Return what tells configurations of one method apart: parameters off their default, the variant.

    Parameters that repeat the budget are left out: they change along a curve. A composition names its parts.
    """
    if len(method.parts) > 1:
        named = (f"{type(part).__name__}({label(part, 'paper', budget)})" for part in method.parts)
        return " ".join([*named, *([] if variant == "paper" else [variant])])
    repeated = {"ratio": budget.ratio, "rule": budget.rule}
    values = {
        field.name: (getattr(method, field.name), field.default)
        for field in fields(method)
        if field.default is not MISSING
    }
    changed = [
        f"{name}={value}"
        for name, (value, default) in values.items()
        if value != default and repeated.get(name) != value
    ]
    return " ".join([*changed, *([] if variant == "paper" else [variant])])
