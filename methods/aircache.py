"""AirCache: "Activating Inter-modal Relevancy KV Cache Compression" (Huang et al., ICCV 2025, arXiv 2503.23956).

Elite window (3.3): among the words of the instruction alone, the last one's attention names those that matter,

    E = {j : A_text[last, j] >= alpha max A_text[last]}.                                     (4), (5)

They vote over visual and elite keys, mean over the window:

    I_j = 1/|E| sum_{i in E} softmax(Q_E [K_V; K_E]^T / sqrt(D) + M)[i, j],                  (6) to (8)
    M_ij = 0 if j stands at i or before it in the prompt, else -infinity.

Differs: (7) is printed without M. The model's own attention is causal, and so is (4): a word does not read later keys.

Differs: the instruction is all text but the system prompt. Here it is the text after the last picture, or, with
`text=between` and words between pictures, the text after the first one; text before the first picture cannot be
distinguished from a system prompt.

Layer budgets (3.4): r_l = (s'_t + s'_k) / 2 * r from the strength, sum I, and the skewness of a layer's importance,
each scaled to mean one over layers (9) to (11). Negative skewness counts as 0.

Differs: the paper does not mention heads. Here attention is averaged over all of them, and a layer has one window and
one choice; `per_head` averages over the query heads of a KV head instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.checks import require
from espalier.methods.compressor import Allocation, CacheCompressor, CacheView
from espalier.methods.select.attention import by_kv_head, logits, paid
from espalier.methods.select.buckets import into_nearest

WINDOWS = ("elite", "all", "continuous", "visual")
TEXTS = ("behind", "between")
#: Keeps ties at the threshold whatever their last bit.
SLACK = 1e-12


@dataclass(frozen=True)
class AirCache(CacheCompressor):
    """Keeps the visual entries that the most relevant words of the question attend to.

    Attributes:
        alpha: part of the largest attention from which a word belongs to the window.
        window: `elite`, or for ablations all words, the last `size` of them, or the last `size` visual tokens of the
            last picture or video.
        size: of a continuous or visual window.
        text: words of the instruction: `behind` means those after the last picture, `between` also those between
            pictures.
        per_head: whether each KV head has a choice of its own.
        merged: share of the evicted entries that are averaged into the nearest kept one (Table 11: it hurts).
    """

    allocation: Allocation = "strength_and_skewness"
    alpha: float = 0.9
    window: Literal["elite", "all", "continuous", "visual"] = "elite"
    size: int = 32
    text: Literal["behind", "between"] = "behind"
    per_head: bool = False
    merged: float = 0.0

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        super().__post_init__()
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "0 to 1")
        require(self.window in WINDOWS, "window", self.window, ", ".join(WINDOWS))
        require(self.size >= 1, "size", self.size, "1 or more")
        require(self.text in TEXTS, "text", self.text, ", ".join(TEXTS))
        require(0 <= self.merged <= 1, "merged", self.merged, "0 to 1")

    @property
    def by_head(self) -> bool:
        """Return `per_head`."""
        return self.per_head

    def score(self, view: CacheView) -> Tensor:
        """Return (1, N), or (H_kv, N) by head. Cost: O(H T (N + T) D) for T words to choose from."""
        observers = self.observers(view)
        votes = self.voting(view, observers)
        # A slot after the prompt is hidden: of words that do not vote, and of candidates, which come once.
        is_read = votes & ~torch.isin(observers, view.candidates)
        slots = torch.cat([view.candidates, torch.where(is_read, observers, view.queries.shape[1])])
        keys = view.keys[:, torch.cat([view.candidates, observers])]
        paid_to = paid(view.queries, keys, view.scaling, observers, key_slots=slots, counted=votes)
        mean_votes = paid_to[:, : len(view.candidates)] / votes.sum()
        return by_kv_head(mean_votes, view.keys.shape[0] if self.per_head else 1)

    def merge(self, scores: Tensor, kept: Tensor) -> Tensor | None:
        """Return (H, N): the nearest kept candidate of each evicted one that is merged."""
        return into_nearest(scores, kept, self.merged)

    def observers(self, view: CacheView) -> Tensor:
        """Return the slots of the window, or of the words that it is chosen of."""
        if self.window == "visual":
            return view.last_picture[-self.size :]
        words = self.instruction(view)
        if self.window == "continuous":
            return words[-self.size :]
        return words

    def voting(self, view: CacheView, observers: Tensor) -> Tensor:
        """Return (T,) booleans: which observers make up the window."""
        if self.window == "elite":
            return elite(self.attention_of_last_word(view), self.alpha)
        return torch.ones_like(observers, dtype=torch.bool)

    def instruction(self, view: CacheView) -> Tensor:
        """Return (T,) the slots of the words that may vote."""
        if self.text == "behind" or view.between is None:
            return view.words
        return torch.cat([view.between, view.words])

    def attention_of_last_word(self, view: CacheView) -> Tensor:
        """Return (T,) the attention of the last word to each word, over words alone, mean over heads. Equation (4)."""
        words = self.instruction(view)
        last, keys = view.queries[:, words[-1:]], view.keys[:, words]
        return logits(last, keys, view.scaling).softmax(dim=-1).mean(dim=(0, 1))


def elite(attention: Tensor, alpha: float) -> Tensor:
    """Return (T,) booleans: the words with at least alpha times the largest attention (T,). Equation (5)."""
    return attention >= alpha * attention.max() - SLACK
