"""From a method's description to the method: itself, or two of them on one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.catalogue import build_method, names_of
from harness.errors import Refused, UserError
from harness.kinds.lookup import as_compressor, as_decoder, as_reducer
from harness.labels import label
from harness.specs import MethodSpec, RunSpec
from methods.base import Method, MethodError
from methods.composed import Composed
from methods.compressor import CacheCompressor


def method_of(asked: MethodSpec) -> Method:
    """Return the method that a spec describes; with `compressor`, both as one.

    Raises:
        UserError: an unknown name or hyper-parameter, or a value that is out of range.
        Refused: the two do not go behind each other.
    """
    method, behind = build_method(asked.name, asked.params), asked.compressor
    if behind is None:
        return method
    compressor = _compressor(behind.name, behind.params)
    return stacked(method, compressor, behind.ratio, (asked.name, behind.name))


def stacked(
    method: Method, compressor: CacheCompressor, ratio: float, names: tuple[str, str]
) -> Composed:
    """Return a method that drops tokens and, behind it, a compressor that evicts a share of what is left.

    Args:
        method: the first of the two.
        compressor: the second.
        ratio: share of the cache entries that goes.
        names: what error lines call them.

    Raises:
        Refused: the first is no method that drops tokens.
    """
    reducer = as_reducer(method)
    if reducer is not None:
        return Composed(reducer, compressor, ratio)
    said = f"method={names[0]} compressor={names[1]}"
    if as_compressor(method) is not None:
        raise Refused(f"{said}: both evict cache entries; valid: one of them, with compressor=none")
    if as_decoder(method) is not None:
        raise Refused(
            f"{said}: a method that decodes speculatively keeps its caches whole; valid: compressor=none"
        )
    raise Refused(
        f"{said}: only a method that drops tokens in one prefill goes before a compressor"
    )


def label_of(spec: RunSpec) -> str:
    """Return the label of a run by its config: what is fitted to a model, such as a schedule, is no setting."""
    return label(method_of(spec.method), spec.method.variant, spec.budget)


def _compressor(name: str, params: Mapping[str, Any]) -> CacheCompressor:
    try:
        found = as_compressor(build_method(name, params))
    except (UserError, MethodError) as error:
        raise UserError(str(error).replace("method.params", "compressor.params")) from error
    if found is None:
        valid = ", ".join(names_of(CacheCompressor))
        raise Refused(f"compressor={name!r} evicts no cache entries; valid: none, {valid}")
    return found
