"""PrefixKV: "Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need" (Wang et al., NeurIPS 2025).

arXiv 2412.03409. Entries are ranked as by Elastic Cache. Layers differ in how many entries hold most of their
attention: sorted and summed up, a layer's scores make a Lorenz curve, and one threshold p for all layers, found by
halving, gives each the shortest prefix that reaches p. Here the search runs on each sample; the paper averages over
a few samples beforehand. Nothing is merged.
"""

from __future__ import annotations

from dataclasses import dataclass

from methods.compressor import Allocation
from methods.elastic import Elastic


@dataclass(frozen=True)
class PrefixKV(Elastic):
    """Elastic Cache's ranking under layer budgets that retain the same part of the attention."""

    allocation: Allocation = "lorenz"
    merged: float = 0.0
