"""The kind of a method on a model: the only table of kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from espalier.harness.errors import UserError
from espalier.harness.kinds.canvas import CANVAS_REDUCER
from espalier.harness.kinds.capped import CAPPED
from espalier.harness.kinds.compressor import COMPRESSOR
from espalier.harness.kinds.conflicts import not_for_canvases, not_for_denoising
from espalier.harness.kinds.decoder import DECODER
from espalier.harness.kinds.denoiser import DENOISER, DENOISING_ONLY
from espalier.harness.kinds.kind import Kind
from espalier.harness.kinds.reducer import REDUCER
from espalier.harness.kinds.two_methods import COMPOSITION
from espalier.harness.specs.run_spec import AnswerRequest
from espalier.methods.base import Decoder, Method, TokenReducer
from espalier.methods.capped import CappedReducer
from espalier.methods.composed import Composed
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer

M = TypeVar("M", bound=Method)

#: By the base class of the method, and by whether the model denoises its answers.
KINDS: Mapping[tuple[type[Any], bool], Kind[Any]] = {
    (TokenReducer, False): REDUCER,
    (CappedReducer, False): CAPPED,
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
        if base is DenoisingReducer:
            raise not_for_canvases(spec.method.name, spec.model.name)
        kind = ON_CANVASES.get(base)
    else:
        kind = KINDS.get((base, spec.model.facts.diffusion is not None))
    if kind is None:
        compressor = spec.method.compressor
        named = None if compressor is None else compressor.name
        raise not_for_denoising(spec.method.name, named, spec.model.name)
    return kind
