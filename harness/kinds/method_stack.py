"""From a method's description to the method: itself, or two of them on one prompt."""

from __future__ import annotations

from espalier.harness.errors import Refused, UserError
from espalier.harness.specs.catalogue import build_method, names_of
from espalier.harness.specs.labels import label
from espalier.harness.specs.run_spec import MethodSpec, RunSpec
from espalier.methods.base import Decoder, Method, TokenReducer
from espalier.methods.composed import Composed
from espalier.methods.compressor import CacheCompressor


def method_of(asked: MethodSpec) -> Method:
    """Return the method that a spec describes; with `compressor`, both as one.

    Raises:
        UserError: an unknown name or hyper-parameter, or a value that is out of range.
        Refused: the two do not go behind each other.
    """
    method, behind = build_method(asked.name, asked.params), asked.compressor
    if behind is None:
        return method
    try:
        compressor = build_method(behind.name, behind.params)
    except UserError as error:
        raise UserError(str(error).replace("method.params", "compressor.params")) from error
    return stacked(method, compressor, behind.ratio, (asked.name, behind.name))


def stacked(method: Method, behind: Method, ratio: float, names: tuple[str, str]) -> Composed:
    """Return a method that drops tokens and, behind it, a compressor that evicts a share of what is left.

    Args:
        method: the first of the two.
        behind: the second.
        ratio: share of the cache entries that goes.
        names: what error lines call them.

    Raises:
        Refused: the first is no method that drops tokens, or the second evicts no cache entries.
    """
    if not isinstance(behind, CacheCompressor):
        valid = ", ".join(names_of(CacheCompressor))
        raise Refused(f"compressor={names[1]!r} evicts no cache entries; valid: none, {valid}")
    if isinstance(method, TokenReducer) and method.in_one_prefill:
        return Composed(method, behind, ratio)
    said = f"method={names[0]} compressor={names[1]}"
    if isinstance(method, CacheCompressor):
        raise Refused(f"{said}: both evict cache entries; valid: one of them, with compressor=none")
    if isinstance(method, Decoder):
        raise Refused(
            f"{said}: a method that decodes speculatively keeps its caches whole; valid: compressor=none"
        )
    raise Refused(
        f"{said}: only a method that drops tokens in one prefill goes before a compressor"
    )


def label_of(spec: RunSpec) -> str:
    """Return the label of a run by its config: what is fitted to a model, such as a schedule, is no setting."""
    return label(method_of(spec.method), spec.method.variant, spec.budget)
