"""Build the method of a spec: one method, or a reducer and a compressor on one prompt."""

from __future__ import annotations

from espalier.harness.errors import UserError
from espalier.harness.kinds.conflicts import check_stack
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.labels import label
from espalier.harness.specs.run_spec import MethodSpec, RunSpec
from espalier.methods.base import Method, TokenReducer
from espalier.methods.composed import Composed
from espalier.methods.compressor import CacheCompressor


def method_of(spec: MethodSpec) -> Method:
    """Return the method of a spec; with `compressor`, a composition of both.

    Raises:
        UserError: an unknown name or hyper-parameter, or a value that is out of range.
        Refused: the two cannot be stacked.
    """
    method, compressor_spec = build_method(spec.name, spec.params, spec.code), spec.compressor
    if compressor_spec is None:
        return method
    try:
        compressor = build_method(
            compressor_spec.name, compressor_spec.params, compressor_spec.code
        )
    except UserError as error:
        line = str(error).replace("method.params", "compressor.params")
        raise UserError(line.replace("method='", "compressor='")) from error
    return stacked(method, compressor, compressor_spec.ratio, (spec.name, compressor_spec.name))


def stacked(method: Method, second: Method, ratio: float, names: tuple[str, str]) -> Composed:
    """Return a composition of a reducer and a compressor that evicts a share of the remaining entries.

    Args:
        method: the reducer.
        second: the compressor.
        ratio: share of the cache entries to evict.
        names: their names in error lines.

    Raises:
        Refused: the first is not a reducer, or the second is not a compressor.
    """
    check_stack((_kind(method), _kind(second)), names)
    assert isinstance(method, TokenReducer)
    assert isinstance(second, CacheCompressor)
    return Composed(method, second, ratio)


def _kind(method: Method) -> str:
    if isinstance(method, TokenReducer):
        return "reducer" if method.in_one_prefill else "denoiser"
    return "compressor" if isinstance(method, CacheCompressor) else "decoder"


def label_of(spec: RunSpec) -> str:
    """Return the label of a run by its config; a schedule that is fitted to a model is not part of it."""
    named = spec.method
    return label(method_of(named), named.variant, named.variants, spec.budget)
