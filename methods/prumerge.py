"""LLaVA-PruMerge: "Adaptive Token Reduction for Efficient LMMs" (Shang et al., ICCV 2025, arXiv 2403.15388).

Acts on the tower's output, before the projector. a_j is the attention that the class token pays patch j in the
tower's last layer, its queries and keys taken as one head over their full width C: softmax(q k^T / sqrt C).
PruMerge keeps the patches with the highest a. PruMerge+ (`uniform`) keeps the outliers only, a above
Q3 + 1.5 (Q3 - Q1) over the sample, and fills up with patches spread evenly over the raster. Every kept patch i then
absorbs the k other patches, kept ones too, with the highest cosine of keys in that layer, NN(i):

    paper    (merging=average):  x'_i = sum_{j in i, NN(i)} a_j x_j / sum_{j in i, NN(i)} a_j
    official (merging=sum):      x'_i = x_i + sum_{j in NN(i)} a_j x_j, and one more token sum_{j not kept} a_j x_j

Differs: the authors keep as many patches as there are outliers, and in PruMerge+ about three times that many more. Here
all rows of a batch have one count, the budget's: `keep` tokens in all, the extra token of the official reading
included; if more outliers exist than fit, the weakest are dropped. The official raster samples start at the first patch
with a step derived from the number of outliers, which no budget fixes. Tokens stand in raster order (the authors put
the highest attention first), the extra token at the last place that is not kept (the authors put it last). Towers
without a class token: the attention that a patch receives or the pooling query pays, in one head likewise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from espalier.methods.base import Mixture, Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require, require_choices
from espalier.methods.select.nearest import nearest
from espalier.methods.select.topk import indices_of, ranking, rows_of

Merging = Literal["average", "sum"]
#: The tower's last layer, which the projector of LLaVA does not read.
ATTENTION, KEYS = Need("wide_cls_attention", layer=-1), Need("wide_tower_keys", layer=-1)
#: Keeps an average defined where all its attentions have rounded to 0.
EPSILON = 1e-12


@dataclass(frozen=True)
class PruMerge(TokenReducer):
    """Keeps the patches that the class token attends to most, and merges patches with similar keys into them.

    Attributes:
        k: how many others each kept patch takes in.
        merging: how it takes them in.
        uniform: PruMerge+: fill up with patches spread evenly over the raster in place of the next highest attentions.
    """

    k: int = 32
    merging: Merging = "average"
    uniform: bool = False

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(self.k >= 0, "k", self.k, "0 or more")
        require_choices(self, merging=Merging)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the tower's output."""
        del depth
        return (Site("vision"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return attention and keys of the tower's last layer, in one head."""
        del site
        return (ATTENTION, KEYS)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep and merge. Cost: O(N log N + keep N (Dk + log k)), and O(keep N D) for the engine's product."""
        attention = view.signals[ATTENTION.key].float()
        order = ranking(attention)
        n_tokens = order.shape[1]
        if keep == n_tokens:
            return Plan(torch.arange(n_tokens, device=order.device).expand_as(order).contiguous())
        n_own = keep - (self.merging == "sum")
        chosen = with_uniform(attention, order, n_own) if self.uniform else first(order, n_own)
        kept = chosen if self.merging == "average" else chosen | last_of(~chosen)
        index = indices_of(kept, keep)

        units = normalize(view.signals[KEYS.key].float(), dim=-1)
        near = nearest(units[rows_of(index), index] @ units.transpose(1, 2), index, self.k)
        itself = torch.nn.functional.one_hot(index, n_tokens)
        if self.merging == "average":
            weight = (near | itself.bool()) * (attention + EPSILON).unsqueeze(1)
            matrix = weight / weight.sum(dim=2, keepdim=True)
            return Plan(index, Mixture(matrix), scores=attention)
        matrix = itself + near * attention.unsqueeze(1)
        remainder = (~chosen * attention).unsqueeze(1)
        matrix = torch.where(chosen.gather(1, index).unsqueeze(2), matrix, remainder)
        return Plan(index, Mixture(matrix), scores=attention)


def first(order: Tensor, n_true: int) -> Tensor:
    """Return (B, N) booleans: the first `n_true` of a ranking."""
    return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :n_true], True)


def last_of(mask: Tensor) -> Tensor:
    """Return (B, N) booleans: the last true entry of each row of a mask."""
    return mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)


def with_uniform(attention: Tensor, order: Tensor, n_true: int) -> Tensor:
    """Return (B, N) booleans, `n_true` in each row: outliers, then places spread evenly over the others.

    Of m tokens left, in raster order, the q-th is taken if q r / m + 1/2 and (q + 1) r / m + 1/2 have another integer
    between them: r of them, as evenly as integers allow, and none nearer to one end.
    """
    quarters = attention.new_tensor([0.25, 0.75])
    low, high = torch.quantile(attention, quarters, dim=1).unsqueeze(2).unbind(0)
    chosen = first(order, n_true) & (attention > high + 1.5 * (high - low))
    n_free = (~chosen).sum(dim=1, keepdim=True)
    wanted = n_true - chosen.sum(dim=1, keepdim=True)
    number = (~chosen).cumsum(dim=1)  # 1 to m; tokens already chosen repeat the one before
    turn = 2 * number * wanted + n_free
    return chosen | (turn // (2 * n_free) > (turn - 2 * wanted) // (2 * n_free))
