"""Checks that every method makes: ranges of hyper-parameters, layers inside the model, finite numbers."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from espalier.methods.plans import PlanError
from espalier.methods.views import MethodError, Site


def require(holds: bool, key: str, value: Any, valid: str) -> None:
    """Raise MethodError with the config key, the value and the valid values, unless `holds`."""
    if not holds:
        raise MethodError(f"method.params.{key}={value!r} is out of range; valid: {valid}")


def require_choices(method: object, **choices: Any) -> None:
    """Raise MethodError unless each named hyper-parameter is among the values of its `Literal`."""
    for key, kind in choices.items():
        value, valid = getattr(method, key), get_args(kind)
        require(value in valid, key, value, ", ".join(valid))


def layer_site(key: str, layer: int, depth: int) -> Site:
    """Return the site before decoder layer `layer`, for methods that read the layer below it.

    Raises:
        MethodError: `layer` is 0, or not a layer of the model.
    """
    valid = f"1 to {depth - 1} (the model has {depth} decoder layers)"
    require(1 <= layer < depth, key, layer, valid)
    return Site("layer", layer)


def early_site(layer: int, depth: int) -> Site:
    """Return the prefix for layer 0 and the site before a decoder layer for any other.

    Raises:
        MethodError: the model has no such layer.
    """
    valid = f"0 (before the decoder) to {depth - 1} (the model has {depth} decoder layers)"
    require(0 <= layer < depth, "layer", layer, valid)
    return Site("layer", layer) if layer else Site("prefix")


def require_finite(values: Tensor, name: str) -> Tensor:
    """Return `values`, or raise PlanError if any of them is NaN or infinite. Waits for the device once."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise PlanError(f"{name}: {bad} of {values.numel()} values are NaN or infinite")
    return values
