"""The words of a prompt that rate the visual tokens: those most relevant to the image."""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.methods.checks import require_finite

#: Relevances that differ from the mean by less than this share of it are rounding: such words count as average.
ROUNDING = 1e-6


def rater_weights(
    embedded: Tensor, places: Tensor, words: Tensor, after: Tensor, above: bool
) -> Tensor:
    """Return (B, T) equal weights of the raters, which sum to 1, and 0 for all other words.

    With r_t = mean over visual tokens v of softmax_t(E_v . E_t) over the words that may rate, the raters are the words
    with r_t at least the mean. If every word is as relevant as the mean, every word rates.

    Args:
        embedded: (B, M, D) embeddings of the visual tokens.
        places: (B, M) their places in the prompt, -1 where a row has fewer.
        words: (B, T, D) embeddings of the words.
        after: (B, T) which words may rate.
        above: raters must lie above the mean.

    Raises:
        MethodError: a product of embeddings is NaN or infinite.

    Cost: O(M T D).
    """
    logits = embedded.float() @ words.float().transpose(1, 2)
    logits = require_finite(logits, "products of embeddings")
    shares = logits.masked_fill(~after.unsqueeze(1), -torch.inf).softmax(dim=2)
    real = (places >= 0).float()
    relevance = (shares * real.unsqueeze(2)).sum(dim=1) / real.sum(dim=1, keepdim=True)
    mean = 1 / after.sum(dim=1, keepdim=True)  # each visual token distributes a sum of 1
    if above:
        chosen = after & (relevance > mean * (1 + ROUNDING))
        chosen = torch.where(chosen.any(dim=1, keepdim=True), chosen, after)
    else:
        chosen = after & (relevance >= mean * (1 - ROUNDING))
    return chosen.float() / chosen.sum(dim=1, keepdim=True)
