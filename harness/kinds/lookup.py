"""The method of a spec and its kind on a model: the only table of kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from espalier.harness.config.method_names import methods_of
from espalier.harness.errors import UserError
from espalier.harness.kinds.compressor import COMPOSITION, COMPRESSOR
from espalier.harness.kinds.decoder import DECODER
from espalier.harness.kinds.denoiser import CANVAS_REDUCER, DENOISER, DENOISING_ONLY
from espalier.harness.kinds.kind import Kind, M, label
from espalier.harness.kinds.reducer import CAPPED, COMBINED, REDUCER
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import AnswerRequest, MethodSpec, RunSpec
from espalier.methods.base import Decoder, Method, TokenReducer
from espalier.methods.capped import CappedReducer
from espalier.methods.composed import Combined, Composed
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer

#: By the base class of the method, and by whether the model denoises its answers.
KINDS: Mapping[tuple[type[Any], bool], Kind[Any]] = {
    (TokenReducer, False): REDUCER,
    (CappedReducer, False): CAPPED,
    (Combined, False): COMBINED,
    (TokenReducer, True): DENOISER,
    (DenoisingReducer, False): DENOISING_ONLY,
    (DenoisingReducer, True): DENOISER,
    (Decoder, False): DECODER,
    (CacheCompressor, False): COMPRESSOR,
    (Composed, False): COMPOSITION,
}

#: On models that denoise canvases, by the base class of the method.
ON_CANVASES: Mapping[type[Any], Kind[Any]] = {TokenReducer: CANVAS_REDUCER}

BASES = frozenset(base for base, _ in KINDS)


def kind_of(method: M, spec: AnswerRequest) -> Kind[M]:
    """Return the kind of a method on the model of a run.

    Raises:
        UserError: the method is derived from no base of a kind.
        Refused: methods of this base do not run on a model that denoises.
    """
    base = next((base for base in type(method).__mro__ if base in BASES), None)
    if base is None:
        valid = ", ".join(dict.fromkeys(base.__name__ for base, _ in KINDS))
        raise UserError(
            f"method {type(method).__name__} is of no kind that runs; valid bases: {valid}"
        )
    if spec.model.facts.canvas is not None:
        kind = ON_CANVASES.get(base)
    else:
        kind = KINDS.get((base, spec.model.facts.diffusion is not None))
    if kind is None:
        refuse("a model that denoises", spec, of_steps=base is DenoisingReducer)
    assert kind is not None  # every case without a kind is refused
    return kind


def method_of(
    spec: MethodSpec, instance: Method | None = None, evictor: Method | None = None
) -> Method:
    """Return the method of a spec; with `compressor`, a composition of both.

    Args:
        spec: names both, with their hyper-parameters.
        instance: the built method.
        evictor: the built compressor.

    Raises:
        UserError: an unknown name or hyper-parameter, or a value that is out of range.
        Refused: the two cannot be stacked.
    """
    method = build_method(spec.name, spec.params, spec.code) if instance is None else instance
    second = spec.compressor
    if second is None:
        return method
    try:
        compressor = evictor or build_method(second.name, second.params, second.code)
    except UserError as error:
        raise UserError(re.sub(r"method(\.params|=')", r"compressor\1", str(error))) from error
    return stacked(method, compressor, second.ratio, (spec.name, second.name))


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
    kinds = _kind(method), _kind(second)
    pair = {"method": {"name": names[0], "compressor": {"name": names[1]}}}
    refuse(
        "two methods", pair, kinds=kinds, compressors=lambda: ", ".join(methods_of("compressor"))
    )
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
