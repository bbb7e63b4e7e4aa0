"""Random numbers derived from positions: both sides of a run, and every rerun, draw the same numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Purpose = Literal["draft", "accept", "replace"]


@dataclass(frozen=True)
class RandomNumbers:
    """Uniform numbers by (seed, position, purpose)."""

    seed: int

    def uniform(self, position: int, purpose: Purpose, turn: int = 0) -> float:
        """Return a number in [0, 1) for a position of the answer; `turn` counts siblings tried there."""
        name = f"{self.seed}/{position}/{purpose}/{turn}".encode()
        digest = hashlib.blake2b(name, digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53
