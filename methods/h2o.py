"""H2O: "Heavy-Hitter Oracle for Efficient Generative Inference" (Zhang et al., NeurIPS 2023, arXiv 2306.14048).

A cache entry is worth the attention that it has received so far: of head h,

    s_j = sum_i A_h[i, j]   over all queries i of the prompt,

and the highest stay, for each KV head by itself. Here it chooses once, after prefill, as AirCache (arXiv 2503.23956)
compares it: nothing is evicted while the answer is decoded, and no recent window is needed where words are never
evicted. A KV head has one copy, chosen by the mean over the query heads that read it.

official: code released for comparisons (KVCache-Factory) repeats keys and values for every query head before it
chooses, so that the cache of a model with grouped heads grows by the group size regardless of eviction.

Differs: the authors' own code does not run on grouped heads, and evicts at every step of decoding, which is not
followed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from espalier.methods.checks import require
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.select.attention import by_kv_head, paid


@dataclass(frozen=True)
class H2O(CacheCompressor):
    """Keeps the entries that received the most attention from the whole prompt.

    Attributes:
        recent: last slots that never go where all of the prompt may.
        repeated: the released code's copies, one for each query head.
    """

    recent: int = 32
    repeated: bool = False

    by_head = True  # each KV head keeps what its own queries attend to

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(self.recent >= 1, "recent", self.recent, "1 or more")

    @property
    def repeats_heads(self) -> bool:
        """Whether heads are repeated, as in the released code."""
        return self.repeated

    @property
    def exempt(self) -> tuple[int, int]:
        """Return the recent window."""
        return (0, self.recent)

    def score(self, view: CacheView) -> Tensor:
        """Return (H_kv, N), or (H, N) for repeated heads. Cost: O(H L^2 D) time in blocks of rows."""
        scores = paid(view.queries, view.keys, view.scaling, None)[:, view.candidates]
        return scores if self.repeated else by_kv_head(scores, view.keys.shape[0])
