"""Which kind a method is: the only place that asks for its base class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from espalier.harness.errors import UserError
from espalier.harness.kinds.by_model import ByModel
from espalier.harness.kinds.compressor import COMPRESSOR
from espalier.harness.kinds.decoder import DECODER
from espalier.harness.kinds.denoiser import DENOISER, DENOISING_ONLY
from espalier.harness.kinds.kind import Kind
from espalier.harness.kinds.reducer import REDUCER
from espalier.harness.kinds.two_methods import COMPOSITION
from espalier.methods.base import Decoder, Method, TokenReducer
from espalier.methods.composed import Composed
from espalier.methods.compressor import CacheCompressor
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.none import NoReduction

M = TypeVar("M", bound=Method)

KINDS: Mapping[type[Any], Kind[Any]] = {
    TokenReducer: ByModel(REDUCER, DENOISER),
    Decoder: ByModel(DECODER),
    CacheCompressor: ByModel(COMPRESSOR),
    DenoisingReducer: ByModel(DENOISING_ONLY, DENOISER),
    Composed: ByModel(COMPOSITION),
}


def kind_of(method: M) -> Kind[M]:
    """Return what runs a method: the kind of the nearest of its bases.

    Raises:
        UserError: its class is derived from no base of a kind.
    """
    return KINDS[_base_of(method)]


def as_reducer(method: Method) -> TokenReducer | None:
    """Return a method that drops tokens in one prefill, for commands about these; None if it is of another kind."""
    own = _base_of(method) is TokenReducer  # and not one that is asked at every denoising step
    return method if own and isinstance(method, TokenReducer) else None


def as_token_reducer(method: Method) -> TokenReducer | None:
    """Return a method that drops tokens, in one prefill or at every denoising step; None if it is of another kind."""
    return method if isinstance(method, TokenReducer) else None


def as_decoder(method: Method) -> Decoder | None:
    """Return a method by which a draft guesses ahead, for commands about these; None if it is of another kind."""
    return method if isinstance(method, Decoder) else None


def as_compressor(method: Method) -> CacheCompressor | None:
    """Return a method that evicts cache entries, for commands about these; None if it is of another kind."""
    return method if isinstance(method, CacheCompressor) else None


def in_front(method: Method) -> TokenReducer | None:
    """Return what shortens the prompt where one engine session answers; None where answers come otherwise."""
    if isinstance(method, Composed):
        return method.reducer
    return NoReduction() if isinstance(method, CacheCompressor) else as_reducer(method)


def _base_of(method: Method) -> type[Any]:
    for base in type(method).__mro__:
        if base in KINDS:
            return base
    valid = ", ".join(base.__name__ for base in KINDS)
    raise UserError(f"method {type(method).__name__} is of no kind that runs; valid bases: {valid}")
