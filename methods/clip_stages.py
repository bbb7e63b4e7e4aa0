"""The base of methods that merge the clips of a video before the decoder and drop tokens inside it."""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Positions, TokenReducer


@dataclass(frozen=True)
class ClipStages(TokenReducer):
    """Merges every clip by itself at the prefix, and acts again before one decoder layer."""

    def needs_frames(self) -> bool:
        """Return true: frames are compared."""
        return True

    def positions(self, depth: int) -> Positions:
        """Close the gaps, as the released codes of these methods after their first stage."""
        del depth
        return "renumbered"
