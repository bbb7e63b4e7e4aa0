"""Positions of the remaining tokens: their original ones, or consecutive ones as in a prompt without the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from espalier.harness.errors import UserError
from espalier.methods.blame import Blame
from espalier.methods.plans import PlanError
from espalier.methods.reducers import Positions

if TYPE_CHECKING:
    from espalier.harness.cost.facts import ModelFacts
    from espalier.harness.engine.layout import Layout
    from espalier.harness.specs.run_spec import PositionPolicy
    from espalier.methods.base import TokenReducer

#: Rule for positions on several axes, as stored in a row; `check_order` checks every prompt against it.
ORDER = "text behind the largest position"


class MisplacedText(RuntimeError):
    """A prompt's text has other positions than in the released models, so that answers would differ from theirs."""


def check_order(positions: Tensor, layout: Layout, axes: int) -> None:
    """Check that every text token of a prompt directly follows the largest position before it, on all axes.

    Args:
        positions: (axes, B, L) as they enter the decoder; additional rows before these axes are ignored.
        layout: of the batch, beams repeated.
        axes: position axes of the decoder.

    Raises:
        MisplacedText: some text token does not; the line names the row and the token.

    Cost: a few sums over B L integers, and one synchronisation with the device.
    """
    places = positions[-axes:]
    valid = layout.valid.to(places.device)
    largest_so_far = places.amax(0).masked_fill(~valid, -1).cummax(1).values
    expected = pad(largest_so_far[:, :-1] + 1, (1, 0))
    misplaced = (places != expected).any(0) & layout.word_mask().to(places.device)
    if not misplaced.any():
        return
    row, token = misplaced.nonzero()[0].tolist()
    raise MisplacedText(
        f"text token {token} of prompt {row} is at {places[:, row, token].tolist()} and should be at "
        f"{int(expected[row, token])}, after the largest position before it: the installed transformers places text "
        "differently than the released model; valid: the version of constraints.txt"
    )


def closes_gaps(policy: PositionPolicy, method: TokenReducer, facts: ModelFacts) -> bool:
    """Return whether a PositionPolicy renumbers the remaining tokens after every site.

    Released codes that close gaps on other models keep time, height and width of each token, so `method` also does on a
    model with several axes.

    Raises:
        UserError: positions have several axes, where gaps cannot be closed.
    """
    if facts.rotary_axes > 1:
        if policy == "renumbered":
            raise UserError(
                f"engine.positions='renumbered' needs positions on one axis, this model has {facts.rotary_axes}; "
                "valid: original, method"
            )
        return False
    depth = facts.text.layers
    if not method.all_sites(facts.tower.layers, depth):
        return False
    if policy != "method":
        return policy == "renumbered"
    with Blame(method, "positions"):
        wanted = method.positions(depth)
        if wanted not in get_args(Positions):
            valid = ", ".join(get_args(Positions))
            raise PlanError(f"`positions` returns {wanted!r}; valid: {valid}")
    return wanted == "renumbered"


def closed_positions(valid: Tensor) -> Tensor:
    """Return (B, M) positions that count the valid slots from 0; slots that are not valid get arbitrary ones."""
    return (valid.long().cumsum(1) - 1).clamp(min=0)


def rotary_tables(
    embedding: Any, hidden: Tensor, positions: Tensor, *layer_type: str
) -> tuple[Tensor, ...]:
    """Return the rotary tables of `positions` (B, t), on the device of the states `hidden` that they are for.

    Args:
        embedding: the decoder's rotary embedding, so that scaled frequencies are the same.
        hidden: (B, t, D); gives type and device.
        positions: one for each state.
        layer_type: of the layer, where tables differ by type.
    """
    with torch.no_grad():
        tables = embedding(hidden, positions.to(hidden.device), *layer_type)
    return tuple(table.to(hidden.device) for table in tables)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor | None = None) -> Tensor:
    """Return (..., S, D) rotated by tables (S, d): pairs are d / 2 apart; dimensions after the first d stay.

    The result is written into `result` if there is one, in its type.
    """
    half = cos.shape[-1] // 2
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = torch.empty_like(x) if result is None or result.dtype != x.dtype else result
    parts = rotated[..., :half], rotated[..., half : 2 * half]
    torch.mul(first, cos[..., :half], out=parts[0]).addcmul_(second, sin[..., :half], value=-1)
    torch.mul(second, cos[..., half:], out=parts[1]).addcmul_(first, sin[..., half:])
    if x.shape[-1] > 2 * half:
        rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated if result is None or rotated is result else result.copy_(rotated)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the inverse of `rotate` by the same tables, also if they are scaled or rounded."""
    scale = cos.square() + sin.square()
    return rotate(x, cos / scale, -sin / scale)
