"""Weights W (B, M, N - M) by which dropped tokens flow into kept ones in the merging steps that RTPrune compares with.

    visionzip   mean of the tokens that resemble i most
    sparsevlm   mean of the clusters that resemble i most, made of the best of the tokens not kept, by their norm
    nuwa        max(cos, 0) (1 - min(1, distance / R)), rows scaled to 1; R^2 = 280/576 of the grid's area
    gtp         D^-1/2 A D^-1/2 over all N tokens; A_ij = 1 if j is one of i's 8 neighbours in the grid or one of the 8
                nearest to i in cosine, which is directed as in GTP-ViT's code; D are the sums of A's rows

The paper (arXiv 2605.00392) does not describe how these were adapted. Here their own selection is not used, nothing
flows between kept tokens, and no kept token gives up its own weight.
"""

from __future__ import annotations

from torch import Tensor

from espalier.methods.base import View
from espalier.methods.select.absorption import clusters, most_similar, nearby
from espalier.methods.select.propagation import mixed_graph, normalised
from espalier.methods.select.similarity import cosine, unit
from espalier.methods.select.topk import rows_of

#: Neighbours (GTP-ViT), share and size of clusters (SparseVLM), area (NUWA).
NEIGHBOURS, RECYCLED, CLUSTER, AREA = 8, 0.3, 10, 280 / 576


def weights_of(merging: str, view: View, norms: Tensor, kept: Tensor, dropped: Tensor) -> Tensor:
    """Return W of the merging step of a name above.

    Args:
        merging: the name.
        view: of all N tokens.
        norms: (B, N) of the tokens.
        kept: (B, M) ascending indices.
        dropped: (B, N - M) likewise, the others.
    """
    tokens, rows = view.tokens, rows_of(kept)
    if merging == "gtp":
        graph = normalised(mixed_graph(cosine(tokens), view.grid, NEIGHBOURS))
        return graph[rows.unsqueeze(2), kept.unsqueeze(2), dropped.unsqueeze(1)]
    takers, givers = tokens[rows, kept], tokens[rows, dropped]
    if merging == "sparsevlm":
        return clusters(givers, takers, norms.gather(1, dropped), RECYCLED, CLUSTER)
    similarity = unit(takers) @ unit(givers).transpose(1, 2)
    if merging == "visionzip":
        return most_similar(similarity)
    return nearby(similarity, view.grid, kept, dropped, AREA)
