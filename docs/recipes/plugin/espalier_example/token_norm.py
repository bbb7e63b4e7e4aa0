"""Keeps the longest tokens. A worked example, not a published method."""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_finite
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class TokenNorm(TokenReducer):
    """Scores each token by its length.

    Attributes:
        p: of the norm, 1 or more.
    """

    p: float = 2.0

    def __post_init__(self) -> None:
        """Check the hyper-parameter."""
        require(self.p >= 1, "p", self.p, "1 or more")

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Act on the projected tokens, before the decoder."""
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the longest tokens. Cost: O(N D + N log N)."""
        lengths = view.tokens.float().norm(p=self.p, dim=-1)
        return Plan(top(require_finite(lengths, "length"), keep))
