"""Speculative decoding (Leviathan et al., ICML 2023, arXiv 2211.17192): a small model drafts, the large one judges.

A round: the draft says gamma tokens, and one forward of the target judges all of them. The first ones that stand are
kept, and the target adds a token of its own: what it says in place of the first refused one, or one more behind all of
them. A token x that the draft drew with q(x) stands with min(1, p(x) / q(x)), and in a refused one's place comes a draw
from norm(max(0, p - q)), so that the answer is distributed as the target's own; greedily, it stands if it is the
target's likeliest.

The draft sees every image or frame with all its tokens, so the ratio has no meaning here.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.windows import InTurn


@dataclass(frozen=True)
class VanillaSD(InTurn):
    """Drafts a chain, then verifies it."""
