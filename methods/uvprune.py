"""UV-Prune: the pruning of "ParallelVLM: Lossless Video-LLM Acceleration" (CVPR 2026, arXiv 2603.19610), by itself.

A visual token v matters if the layers move it towards the prompt's words x. With S^l(i, j) = cos(v_i, x_j) between
the hidden states after l layers (l = 0: as they enter the decoder), the paper's equation (3) telescopes:

    dS_i = sum_j sum_{l=1..L} (S^l(i, j) - S^{l-1}(i, j)) = sum_j (S^L(i, j) - S^0(i, j))

so that two layers suffice; and since sum_j cos(v_i, x_j) = v_i/|v_i| . sum_j x_j/|x_j|, no matrix of pairs is needed.
The tokens with the highest dS stay, before decoder layer L.

Differs: in the paper they are the tokens of a draft model, chosen by its verifier (methods/parallelvlm.py); here the
model prunes itself, and its layers 0 to L-1 still see every token. Words are all text of the prompt, the template
included.

The paper compares four criteria (figures 7 and 9). With A^l(j, i) the attention, mean over heads, that word j pays
token i in layer l, counted from 0:

    similarity_variation:  sum_j (S^L(i, j) - S^0(i, j))
    similarity:            sum_j S^L(i, j)
    attention_variation:   sum_j (A^{L-1}(j, i) - A^0(j, i)), which telescopes in the same way
    attention:             sum_j A^{L-1}(j, i)

Differs: the paper does not spell out the last two. Attention belongs to a layer, similarity to the output of one, so L
layers have one attention step less, and attention_variation needs two layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from espalier.methods.base import Need, Plan, Site, TokenReducer, View
from espalier.methods.checks import layer_site, require, require_choices
from espalier.methods.select.topk import top

Criterion = Literal["similarity_variation", "similarity", "attention_variation", "attention"]

#: The paper's layer, for models of 28 to 80.
LAYER = 20


@dataclass(frozen=True)
class UVPrune(TokenReducer):
    """Keeps the visual tokens that have come closest to the words since they entered the decoder.

    Attributes:
        L: decoder layer before which tokens go; None: 20, or a quarter of the depth where a model ends before.
        criterion: what a token is worth, see above.
    """

    L: int | None = None
    criterion: Criterion = "similarity_variation"

    takes_separators = True  # states and attention of the decoder

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        require_choices(self, criterion=Criterion)
        why = "two layers of attention" if self._first_layer > 1 else "the layers before"
        fits = self.L is None or self._first_layer <= self.L
        require(fits, "L", self.L, f"{self._first_layer} or more ({why} are compared)")

    @property
    def _first_layer(self) -> int:
        return 2 if self.criterion == "attention_variation" else 1

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site before layer L."""
        natural = LAYER if depth > LAYER else max(self._first_layer, depth // 4)
        return (layer_site("L", natural if self.L is None else self.L, depth),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return tokens and words as they entered the decoder and the words at the site, or the words' attention."""
        del site
        entered = (Need("projected"), Need("text_embeddings"))
        if self.criterion == "similarity_variation":
            return (*entered, Need("text_states"))
        if self.criterion == "similarity":
            return (Need("text_states"),)
        first = (Need("text_attention", 0),) if self.criterion == "attention_variation" else ()
        return (*first, Need("text_attention"))

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the `keep` highest. Cost: O((N + T) D + N log N); by attention O(T N + N log N)."""
        scores = self.scores(view)
        return Plan(top(scores, keep), scores=scores)

    def scores(self, view: View) -> Tensor:
        """Return the scores (B, N) in fp32."""
        signals = view.signals
        if self.criterion in ("attention", "attention_variation"):
            paid = signals["text_attention"].float().sum(dim=1)
            if self.criterion == "attention":
                return paid
            return paid - signals["text_attention@0"].float().sum(dim=1)
        now = closeness(view.tokens, signals["text_states"])
        if self.criterion == "similarity":
            return now
        return now - closeness(signals["projected"], signals["text_embeddings"])


def closeness(tokens: Tensor, words: Tensor) -> Tensor:
    """Return (B, N) the sum of cosines in fp32 of each token (B, N, D) with the words (B, T, D); zero rows add 0."""
    words_sum = normalize(words.float(), dim=-1).sum(dim=1)
    features = tokens.float()
    lengths: Tensor = vector_norm(features, dim=-1).clamp_(min=1e-12)
    return (features @ words_sum.unsqueeze(-1)).squeeze(-1) / lengths
