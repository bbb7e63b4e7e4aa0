"""UV-Prune: the pruning of "ParallelVLM: Lossless Video-LLM Acceleration" (CVPR 2026, arXiv 2603.19610), by itself.

A visual token v matters if the layers move it towards the prompt's words x. With S^l(i, j) = cos(v_i, x_j) between
the hidden states behind l layers (l = 0: as they enter the decoder), the paper's equation (3) telescopes:

    dS_i = sum_j sum_{l=1..L} (S^l(i, j) - S^{l-1}(i, j)) = sum_j (S^L(i, j) - S^0(i, j))

so that two layers suffice, and as sum_j cos(v_i, x_j) = v_i/|v_i| . sum_j x_j/|x_j|, no matrix over pairs does either.
The tokens with the highest dS stay, before decoder layer L. In the paper they are the tokens of a draft model, chosen
by its verifier; here the model prunes itself, whose layers 0 to L-1 still see every token. Words are all that the
prompt says beside the images, the template's own included.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from methods.base import Need, Plan, Site, TokenReducer, View
from methods.checks import layer_site, require
from methods.select.ranking import top

#: The paper's layer, for models of 28 to 80.
LAYER = 20


@dataclass(frozen=True)
class UVPrune(TokenReducer):
    """Keeps the visual tokens that have come closest to the words since they entered the decoder.

    Attributes:
        L: decoder layer before which tokens go; None: 20, or a quarter of the depth where a model ends before.
    """

    L: int | None = None

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require(
            self.L is None or self.L >= 1, "L", self.L, "1 or more (the layers before are compared)"
        )

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer L."""
        natural = LAYER if depth > LAYER else max(1, depth // 4)
        return (layer_site("L", natural if self.L is None else self.L, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return tokens and words as they entered the decoder, and the words at the site."""
        del site
        return (Need("projected"), Need("text_embeddings"), Need("text_states"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the `keep` highest. Cost: O((N + T) D + N log N)."""
        signals = view.signals
        before = closeness(signals["projected"], signals["text_embeddings"])
        return Plan(top(closeness(view.tokens, signals["text_states"]) - before, keep))


def closeness(tokens: Tensor, words: Tensor) -> Tensor:
    """Return (B, N) the sum of cosines in fp32 of each token (B, N, D) with the words (B, T, D); zero rows add 0."""
    said = normalize(words.float(), dim=-1).sum(dim=1)
    features = tokens.float()
    lengths: Tensor = vector_norm(features, dim=-1).clamp_(min=1e-12)
    return (features @ said.unsqueeze(-1)).squeeze(-1) / lengths
