"""Elastic Cache: "Efficient Inference of Vision Instruction-Following Models" (Liu et al., ECCV 2024).

arXiv 2407.18121. An entry's score is the attention that all queries of the prompt pay it, mean over heads; all heads of
a layer keep the same entries. Evicted entries are merged: each is averaged, keys and values, into the kept entry
nearest to it in the sequence. AirCache (arXiv 2503.23956, Table 11) finds that merging hurts and leaves it out:
`merged=0`.

official: the released code uses the values of an argsort as ranks, so that it does not keep the top: entry j is evicted
if the index of the j-th smallest score is among the first f. It also counts evicted entries from the protected first
slot, but reads them from slot 0: instead of entry j the one before it, which may be a kept one, is averaged into the
kept entry nearest to j - 1.

Differs: the released code evicts one entry more than the ratio requires, continues positions from the shortened length,
and while decoding evicts about one entry at a fixed place for each new token. None of this is followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from espalier.methods.checks import require
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.select.attention import paid
from espalier.methods.select.buckets import into_nearest


@dataclass(frozen=True)
class Elastic(CacheCompressor):
    """Keeps the entries that received the most attention, one choice for all heads.

    Attributes:
        merged: share of the evicted entries that are averaged into the nearest kept one, the highest scores first; the
            others are dropped.
        argsort_as_rank: the released code's error in choosing what stays.
        shifted_merge: its error in merging: the entry before each evicted one merges, into the one nearest to that.
    """

    merged: float = 1.0
    argsort_as_rank: bool = False
    shifted_merge: bool = False

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(0 <= self.merged <= 1, "merged", self.merged, "0 to 1")

    @property
    def exempt(self) -> tuple[int, int]:
        """Return the first slot and the last."""
        return (1, 1)

    @property
    def merge_shift(self) -> int:
        """Return 1 for the released code's shift by the protected first slot."""
        return 1 if self.shifted_merge else 0

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N). Cost: O(H L^2 D) time in blocks of rows, without a stored map."""
        scores = paid(view.queries, view.keys, view.scaling, None).mean(dim=0)[view.candidates]
        if self.argsort_as_rank:
            scores = scores.argsort(stable=True).to(scores.dtype)
        return scores.unsqueeze(0)

    def merge(self, scores: Tensor, kept: Tensor) -> Tensor | None:
        """Return (1, N): the nearest kept candidate of each evicted one that is merged."""
        return into_nearest(scores, kept, self.merged, self.merge_shift)
