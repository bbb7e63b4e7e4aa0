"""A denoised answer between two steps: its tokens, who decides, and the positions that need logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from espalier.methods.select.topk import rows_of


@dataclass(frozen=True)
class AnswerState:
    """An answer between two steps.

    Attributes:
        ids: (B, G) token at each position, masks where none has been unveiled.
        deciders: (B, G) booleans, the positions unveiled in the previous step.
        step: number of the next step.
        places: (B, M) positions that need logits; None: all.
        most_deciders: deciders of the row with the most of them; None: not known without reading the device.
        first_kept: indices (n,) of the visual tokens that the first step kept, of each row; empty in that step.
    """

    ids: Tensor
    deciders: Tensor
    step: int
    places: Tensor | None = None
    most_deciders: int | None = None
    first_kept: Sequence[Tensor] = ()

    def choose(self, states: Tensor) -> Tensor:
        """Return the states (B, M, D) that predict the positions that need logits, out of those of all (B, G, D).

        More than G states: of the token before the answer, then of its positions.
        """
        if self.places is None:
            return states[:, : self.ids.shape[1]]
        places = self.places.to(states.device)  # the last layer's, and the ids' the first's
        return states[rows_of(places), places]
