"""Pairs that cannot run: method and compressor, method and model, model and benchmark; by names, without torch."""

from __future__ import annotations

from espalier.harness.config.group_lists import choices
from espalier.harness.config.method_names import method_kind
from espalier.harness.errors import Refused, UserError


def check_stack(kinds: tuple[str | None, str | None], names: tuple[str, str]) -> None:
    """Refuse a method and a compressor that cannot be stacked.

    Args:
        kinds: of both, as in `method_kind`.
        names: of both, for the error line.

    Raises:
        Refused: the first does not drop tokens in one prefill, or the second is not a compressor.
    """
    if kinds[1] != "compressor":
        valid = ", ".join(name for name in choices("method") if method_kind(name) == "compressor")
        raise Refused(f"compressor={names[1]!r} evicts no cache entries; valid: none, {valid}")
    line = f"method={names[0]} compressor={names[1]}"
    if kinds[0] == "compressor":
        raise Refused(f"{line}: both evict cache entries; valid: one of them, with compressor=none")
    if kinds[0] == "decoder":
        raise Refused(
            f"{line}: a method that decodes speculatively keeps its caches whole; valid: compressor=none"
        )
    if kinds[0] != "reducer":
        raise Refused(
            f"{line}: only a method that drops tokens in one prefill goes before a compressor"
        )


def not_for_denoising(method: str, compressor: str | None, model: str) -> Refused:
    """Return the error for a method or a compressor that needs a model which generates token by token."""
    name, valid = f"method={method!r}", "a method that drops tokens, such as fastv"
    if compressor is not None:
        name, valid = f"compressor={compressor!r}", "none"
    return Refused(
        f"{name} needs a model that generates one token after another, and model={model!r} denoises its answers; "
        f"valid: {valid}"
    )


def not_for_canvases(method: str, model: str) -> Refused:
    """Return the error for a method of denoising steps on a model that denoises canvases of random words."""
    return Refused(
        f"method={method!r} ranks visual tokens by the places that a step unmasks, and model={model!r} has no masks: "
        "it starts from random words, and a step accepts some by their entropy and draws all others anew; valid: a "
        "method that drops tokens in the prefill, such as fastv"
    )


def check_vocabulary(model: str, closed: bool, benchmark: str, published: bool) -> None:
    """Refuse a published benchmark on a model with a closed vocabulary.

    Raises:
        UserError: the answers would be noise, and the row looks like any other.
    """
    if closed and published:
        valid = ", ".join(name for name in choices("benchmark") if name.startswith("seedling_"))
        raise UserError(
            f"benchmark={benchmark!r} on model={model!r}, which knows the words of its own scenes alone: the score "
            f"would mean nothing; valid: {valid}, another model, or model.closed_vocabulary=false to run it anyway"
        )
