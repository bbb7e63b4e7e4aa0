"""FastV while an answer is denoised, as D3ToM is compared with it (AAAI 2026, arXiv 2511.12280, appendices A.1, B.3).

At every denoising step but the first, the visual tokens are ranked before decoder layer K, the one in which D3ToM
merges, by the attention that they received in layer K-1, A being the mean over heads:

    deciders:  a_j = sum_{i in D} A_ij     D: the answer's tokens unveiled in the step before
    last:      a_j = A_last,j              the prompt's last token
    mean:      a_j = 1/L sum_i A_ij        all tokens, since every token sees every other

The N_keep tokens with the highest a_j stay, in their order and with their position ids; layers K to the last run
without the others (24). The next step starts from every visual token again.

Differs: the appendix does not name the ranking attention. Its count (24) gives the printed figures only if the first
step keeps all tokens, as it must if deciders rank; hence the default. The other two also leave the first step whole, so
that all three cost the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from espalier.methods.base import Need, Site
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.fastv import FastV


@dataclass(frozen=True)
class FastVDenoising(DenoisingReducer, FastV):
    """Keeps, step by step, the visual tokens that receive the most attention.

    Attributes:
        K: decoder layer before which tokens are dropped (layers 0..K-1 see all of them).
        queries: the tokens with attention that counts.
    """

    K: int = 3
    queries: Literal["deciders", "last", "mean"] = "deciders"  # type: ignore[assignment]

    signals: ClassVar[Mapping[str, str]] = {"deciders": "decider_attention", **FastV.signals}

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the attention that layer K-1 pays to visual tokens."""
        del site
        return (Need(self.signals[self.queries], self.K - 1),)
