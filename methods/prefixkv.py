"""PrefixKV: "Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need" (Wang et al., NeurIPS 2025).

arXiv 2412.03409. Entries are ranked as by Elastic Cache. Layers differ in how many entries hold most of their
attention: sorted and summed up, a layer's scores make a Lorenz curve, and one threshold p for all layers, found by
halving, gives each the shortest prefix that reaches p. Here the search runs on each sample; the paper averages over
a few samples beforehand. Nothing is merged.

official: the released curves include the first slot and the last, which always stay, and subtract them after the
threshold: of a layer of L entries, max(0, L - n(p) - 2) are evicted. Here these two are the first and the last
candidate. The search ends when the number of evicted entries is within five of the target, scales each layer's number
to the total and cuts off its fraction, so that a layer may keep up to one entry too many. It does not end if no
threshold comes that close; here it stops after 50 halvings.

Differs: averages over samples, and eviction during decoding, are not followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.compressor import Allocation
from espalier.methods.elastic import Elastic
from espalier.methods.select.budgets import lorenz_curves, reaching

#: Of the released search: entries that it may be off, and halvings after which it would go on for ever.
TOLERANCE, ATTEMPTS = 5, 50
#: Entries of a layer that it never lets go: the first and the last.
PROTECTED = 2


@dataclass(frozen=True)
class PrefixKV(Elastic):
    """Elastic Cache's ranking under layer budgets that retain the same part of the attention.

    Attributes:
        truncated: the released code's protected ends, its search and its rounding, which miss the budget by a few
            entries.
    """

    allocation: Allocation = "lorenz"
    merged: float = 0.0
    truncated: bool = False

    @property
    def exempt(self) -> tuple[int, int]:
        """Return the first slot and the last; in the official reading they are candidates instead."""
        return (0, 0) if self.truncated else super().exempt

    def slack(self, depth: int) -> int:
        """Return how many entries too many may stay: a fraction a layer, and the error of an unscaled search."""
        return 2 * depth + TOLERANCE if self.truncated else 0

    def allocate(self, scores: Sequence[Tensor], total: int) -> Tensor:
        """Return (layers,) counts: the base's, or the released code's with the two protected entries."""
        if not self.truncated or self.allocation != "lorenz":
            return super().allocate(scores, total)
        curves = lorenz_curves(scores)
        sizes = torch.tensor([len(curve) for curve in curves], dtype=torch.float64)
        n_evicted = float(sizes.sum()) - total
        low, high = 0.0, 1.0
        for _ in range(ATTEMPTS):
            middle = (low + high) / 2
            evicted = (sizes - reaching(curves, middle) - PROTECTED).clamp(min=0)
            if abs(float(evicted.sum()) - n_evicted) < TOLERANCE:
                break
            low, high = (middle, high) if float(evicted.sum()) > n_evicted else (low, middle)
        evicted = (evicted * (n_evicted / max(float(evicted.sum()), 1))).floor()
        return (sizes - evicted).maximum(sizes.clamp(max=PROTECTED)).long()

    def keep(self, scores: Tensor, count: int) -> Tensor:
        """Return (H, count) ascending candidates: the first and the last if they are candidates, then the highest."""
        if self.truncated:
            scores = scores.clone()
            # Two slices: a list of indices would be sent to the device.
            scores[:, 0] = scores[:, -1] = scores.amax() + 1
        return super().keep(scores, count)
