"""Labels that distinguish configurations of one method, for curves and lines of tables."""

from __future__ import annotations

from dataclasses import MISSING, fields

from espalier.harness.cost.budget import Budget
from espalier.methods.base import Method


def label(method: Method, variant: str, budget: Budget) -> str:
    """Return the label of a method's configuration: parameters that differ from their default, and the variant.

    Parameters that repeat the budget are left out: they change along a curve. A composition has the labels of its parts
    before its own.
    """
    repeated = {"ratio": budget.ratio, "rule": budget.rule}
    values = {
        field.name: (getattr(method, field.name), field.default)
        for field in fields(method)
        if field.default is not MISSING
    }
    parts = [part for part in method.parts if part is not method]
    part_labels = [(type(part).__name__, label(part, "paper", budget)) for part in parts]
    changed = [
        f"{name}={value}"
        for name, (value, default) in values.items()
        if value != default and repeated.get(name) != value
    ]
    named_parts = [f"{part}({part_label})" for part, part_label in part_labels if part_label]
    return " ".join([*named_parts, *changed, *([] if variant == "paper" else [variant])])
