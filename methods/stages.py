"""The base of PyramidDrop, in one prefill or at each denoising step: stages that keep equal shares of their input."""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Positions, TokenReducer


@dataclass(frozen=True)
class Stages(TokenReducer):
    """Drops tokens between stages of the decoder, ranked by attention alone."""

    takes_separators = True

    def fractions(self, share: float, n_sites: int) -> tuple[float, ...]:
        """Return x, x^2 and so on for the share x of one stage; `share` is the last stage's."""
        return tuple(share ** (stage / n_sites) for stage in range(1, n_sites + 1))

    def positions(self, depth: int) -> Positions:
        """Close the gaps after every stage, as the released code (`pdrop_rank_drop`, and each step's positions)."""
        del depth
        return "renumbered"
