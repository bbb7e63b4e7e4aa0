"""No reduction: the control that every other row is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from espalier.methods.base import Plan, Site, TokenReducer, View


@dataclass(frozen=True)
class NoReduction(TokenReducer):
    """Keeps every visual token: it acts nowhere, so the model runs untouched."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return no site."""
        del depth
        return ()

    def plan(self, view: View, keep: int) -> Plan:
        """Keep all tokens; the engine never calls it, because there is no site."""
        del keep
        n_rows, n_tokens, _ = view.tokens.shape
        return Plan(torch.arange(n_tokens, device=view.tokens.device).expand(n_rows, n_tokens))
