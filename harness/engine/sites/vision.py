"""`vision` sites: they decide on the features that enter the projector, and shorten the input of decoder layer 0.

The tokens are dropped at the decoder's input for every model: some call the projector once, some several times, some
inside the tower. Features that the method merged are projected again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.harness.engine.layout import mix
from espalier.harness.engine.sites.prefix import gather_arguments
from espalier.harness.engine.sites.site import Sites

if TYPE_CHECKING:
    from espalier.harness.engine.model_parts import ModelParts
    from espalier.harness.engine.reduce import Decision, Rows
    from espalier.harness.engine.sites.site import Arguments


class VisionSites(Sites):
    """The method sees features; a merged token is the projection of merged features.

    Where the model blends projected units into tokens (bilinear pooling), features do not correspond to tokens: the
    method sees the blend, and merging happens after the projector.
    """

    reads_features = True

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Apply each site and gather the remaining tokens."""
        # Without images in the batch there are no features, and no row has tokens to mix.
        units = torch.empty(0) if features is None else features.to(kwargs["inputs_embeds"].device)
        for number, _ in self.sites:
            kwargs = self._reduce(number, units, kwargs)
        return kwargs

    def _reduce(self, number: int, units: Tensor, kwargs: Arguments) -> Arguments:
        prefill = self.prefill
        layout = prefill.layout.repeat(prefill.beams)

        def blended(rows: Rows, n: int) -> Tensor:
            share = None if layout.share is None else layout.share[rows][:, :n]
            return mix(units, layout.source[rows][:, :n], share)

        projected = prefill.tokens(kwargs["inputs_embeds"])
        decision = prefill.decide(number, blended, projected)
        if decision.merged:
            decision = _project_merged(prefill.setup.adapter, decision)
            counts = zip(decision.counts, layout.blended, strict=True)
            reprojected = tuple(0 if mixed else count for count, mixed in counts)
            prefill.reprojected = reprojected[:: prefill.beams]
        return gather_arguments(prefill, decision, kwargs)


def _project_merged(adapter: ModelParts, decision: Decision) -> Decision:
    """Return the decision with merged features projected to the decoder's width."""
    merged = tuple(
        replace(group, values=_project(adapter, group.values)) if group.features else group
        for group in decision.merged
    )
    return replace(decision, merged=merged)


def _project(adapter: ModelParts, features: Tensor) -> Tensor:
    """Project (b, k, D) features."""
    projected = adapter.project(features.flatten(0, 1)).view(*features.shape[:2], -1)
    return projected.to(features.device)
