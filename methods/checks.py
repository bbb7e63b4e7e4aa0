"""Checks that every method makes: ranges of hyper-parameters, layers inside the model, finite numbers."""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor

from espalier.methods.conditions import Condition, PlanError, require_all
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
    """Return `values`, or raise PlanError if any of them is NaN or infinite; read as in `require_all`."""
    total = values.numel()

    def error(finite: int) -> PlanError:
        return PlanError(f"{name}: {total - finite} of {total} values are NaN or infinite")

    require_all([Condition(values.isfinite().sum(), error, total)])
    return values
