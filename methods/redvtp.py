"""RedVTP: pruning by attention of the tokens that are still masked (Xu et al., CVPR 2026 Findings, arXiv 2511.12428).

The first denoising step sees every visual token. Of its attention A, mean over all layers and heads, the rows of the
answer's tokens M that it leaves masked rank the visual tokens:

    a_j  = 1/|M| sum_{i in M} A_ij
    keep = the floor(N (1 - r)) tokens with the highest a_j, at least one, the lower index first

All later steps run without the others, from the first layer on, and count positions anew (engine.positions=method): by
the paper these scores hardly change from step to step. Visual tokens are all positions of a picture, newlines included,
as in the released code, which runs without a cached prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from espalier.methods.base import Need, Plan, Site, View
from espalier.methods.denoiser import DenoisingReducer
from espalier.methods.select.topk import top


@dataclass(frozen=True)
class RedVTP(DenoisingReducer):
    """Keeps, after the first step, the tokens that masked tokens attend to most."""

    takes_separators = True  # attention alone ranks
    takes_newlines = True
    rounds_down = True

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the input of the decoder; in the first step every token stays there."""
        del depth
        return (Site("prefix"),)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the masked tokens' attention in the first step."""
        del site
        return (Need("masked_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the `keep` highest. Cost: O(N log N) after G rows of attention in each layer of the first step."""
        return Plan(top(view.signals["masked_attention"], keep))
