"""CDPruner: "Beyond Attention or Similarity: Maximizing Conditional Diversity" (Zhang et al., 2025, arXiv 2506.10967).

Keeps the set S of projected tokens x that greedily maximises the determinant of its submatrix of the kernel

    L = diag(r~) cos(x, x) diag(r~),    r~_i = (r_i - min r + 1e-6) / (max r - min r)

(MAP of a determinantal point process: tokens dissimilar to each other and relevant to the prompt), in their order. The
relevance r_i is the mean over the prompt's words w of cos(x_i, w) between a projected token and the words' embeddings,
both as they enter the decoder. Words are all text of the prompt, the template included. If all tokens are equally
relevant (max = min), r~ is 1.

Differs: the authors take the relevance from CLIP's text tower, which multimodal models do not include; there a token is
the more relevant the lower its cosine, which they call particular to CLIP's patches, and here the higher. Their code
scales and selects in each crop of a high-resolution image separately, with an equal budget; here one selection covers
all tokens of a sample. Where their factorisation runs out of rank it returns tokens twice; here the most relevant
remaining tokens fill the count. The exponent that trades relevance for diversity is off in their code and is not
offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import require_choices, require_finite
from espalier.methods.select.cosines import cosines_of_units
from espalier.methods.select.dpp import dpp_map
from espalier.methods.select.similarity import unit

EPSILON = 1e-6
#: A spread of relevance below this is rounding of fp32: such tokens count as equally relevant.
FLAT = 1e-6
Relevance = Literal["words", "none"]


@dataclass(frozen=True)
class CDPruner(TokenReducer):
    """Keeps tokens that are dissimilar to each other and similar to the prompt's words.

    Attributes:
        relevance: `words`, or `none` for diversity without a condition (all tokens equally relevant).
    """

    relevance: Relevance = "words"

    takes_separators = True  # projected tokens are compared

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require_choices(self, relevance=Relevance)

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the projected tokens, before the decoder."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the words' embeddings if relevance counts."""
        del site
        return (Need("text_embeddings"),) if self.relevance == "words" else ()

    def plan(self, view: View, keep: int) -> Plan:
        """Keep a diverse and relevant set. Cost: O(N^2 D / 2) for the similarities, O(T D), then O(keep^2 N)."""
        units = unit(view.tokens)
        if self.relevance == "words":
            quality = rescaled(relevance_of(units, view.signals["text_embeddings"]))
        else:
            quality = torch.ones_like(units[:, :, 0])
        kept, spare = dpp_map(cosines_of_units(units), quality, keep)
        return Plan(kept, spare=spare)


def relevance_of(units: Tensor, words: Tensor) -> Tensor:
    """Return (B, N) the mean cosine of tokens of length 1 (B, N, D) with the words (B, T, D), zero rows left out."""
    n_words = (words != 0).any(dim=-1).sum(dim=1).clamp(min=1)
    mean = unit(words).sum(dim=1) / n_words.unsqueeze(1)
    return (units @ mean.unsqueeze(-1)).squeeze(-1)


def rescaled(relevance: Tensor) -> Tensor:
    """Return the relevances (B, N) stretched to (0, 1], each row by itself.

    Raises:
        MethodError: a relevance is NaN or infinite.
    """
    low, high = require_finite(relevance, "relevance").aminmax(dim=1, keepdim=True)
    spread = high - low
    flat = spread < FLAT
    stretched = (relevance - low + EPSILON) / spread.masked_fill(flat, 1)
    return stretched.masked_fill(flat, 1)
