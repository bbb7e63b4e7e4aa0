"""Sparse-to-dense decoding (Zhang et al., ACL 2025, arXiv 2505.19155): the target drafts on a part of its own cache.

No second model and no second prefill: after the prefill, drafting attends in every layer to all entries of words and to
the K visual entries that the words attend to most. Verification attends to everything, and its keys and values stay in
the cache. K = (1 - ratio) N, the same for every layer; each layer makes its own choice, which its heads share and which
holds for the whole answer. Positions are those of the full prompt.

Drafting costs a full pass over the weights, so only the cost of the cache is saved; in return nearly all tokens are
accepted, and the window is long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from espalier.methods.base import Need, Site, Source, View
from espalier.methods.select.topk import top
from espalier.methods.windows import InTurn


@dataclass(frozen=True)
class STD(InTurn):
    """Drafts with the target itself: layers attend to the words and to the visual entries that these attend to most.

    Attributes:
        gamma: tokens drafted in a round.
    """

    source: ClassVar[Source] = "cache"

    gamma: int = 9

    takes_separators = True  # attention alone ranks
    guided = True  # the target's prefill chooses the entries

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the place after the last layer: all layers have chosen by then."""
        return (Site("layer", depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the words' attention in every layer."""
        return tuple(Need("text_attention", layer) for layer in range(site.layer))

    def choose(self, view: View, keep: int) -> Tensor:
        """Return (B, layers, keep) the highest of each layer. Cost: O(L (T N + N log N)), L layers, T words."""
        rows = [view.signals[need.key].float().sum(dim=1) for need in self.needs(view.site)]
        paid = torch.stack(rows, dim=1)
        n_rows, n_layers, _ = paid.shape
        return top(paid.flatten(0, 1), keep).view(n_rows, n_layers, keep)
