"""A method of a user: tokens with the longest vectors stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class Longest(TokenReducer):
    """Longest tokens."""

    power: float = 2.0

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Act before the decoder."""
        del depth
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the longest tokens."""
        lengths = [row.float().norm(p=self.power, dim=-1) for row in view.tokens]
        return Plan(top(torch.stack(lengths), keep))
