"""Speculative decoding (Leviathan et al., ICML 2023, arXiv 2211.17192): a small model drafts, the large one verifies.

A round: the draft proposes gamma tokens, and one forward of the target verifies all of them. The longest accepted
prefix is kept, and the target adds one token: its own in place of the first rejected one, or one more after all of
them. A token x drawn by the draft with q(x) is accepted with min(1, p(x) / q(x)), and a rejected one is replaced by a
draw from norm(max(0, p - q)), so that the answer has the target's distribution; greedily, a token is accepted if it is
the target's likeliest.

The draft sees every image or frame with all its tokens, so the ratio has no meaning here.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.windows import InTurn


@dataclass(frozen=True)
class VanillaSD(InTurn):
    """Drafts a chain, then verifies it."""
