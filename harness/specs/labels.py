"""Labels that distinguish configurations of one method, for curves and lines of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from espalier.harness.cost.budget import Budget
from espalier.methods.base import Method

#: The hyper-parameters that each variant of a method sets; empty for a method with one reading.
Variants = Mapping[str, Mapping[str, Any]]


def label(method: Method, variant: str, variants: Variants, budget: Budget) -> str:
    """Return the label of a method's configuration: parameters off their default, and which of several variants it is.

    The default of a parameter is what the variant sets, else that of the class. Parameters that repeat the budget are
    left out: they change along a curve. A composition has the labels of its parts before its own; the variant is that
    of its first part.
    """
    sets = variants.get(variant, {})
    first = method.parts[0]
    parts = [part for part in method.parts if part is not method]
    named = [
        (type(part).__name__, _changed(part, sets if part is first else {}, budget))
        for part in parts
    ]
    words = [f"{name}({' '.join(changed)})" for name, changed in named if changed]
    return " ".join([*words, *_changed(method, sets, budget), *([variant] if sets else [])])


def _changed(method: Method, sets: Mapping[str, Any], budget: Budget) -> list[str]:
    repeated = {"ratio": budget.ratio, "rule": budget.rule}
    values = [
        (field.name, getattr(method, field.name), sets.get(field.name, field.default))
        for field in fields(method)
    ]
    return [
        f"{name}={value}"
        for name, value, default in values
        if default is not MISSING and value != default and repeated.get(name) != value
    ]
