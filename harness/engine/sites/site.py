"""What the sites of every kind have in common, so that a pass only has to call them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from espalier.harness.cost.row_work import NO_WORK, Work
from espalier.harness.engine.prefill import Prefill
from espalier.methods.base import Site

Arguments = dict[str, Any]

#: A site and its number among all of the method's.
NumberedSite = tuple[int, Site]


class Sites:
    """Sites of one kind that stand next to each other, in one pass. A kind overrides the moments at which it acts.

    Args:
        prefill: the batch.
        sites: these sites, first to last.
    """

    #: Whether the kind reads what goes into the projector.
    reads_features = False
    #: Whether the kind acts before there is a prompt to keep (harness/engine/prompt.py).
    in_tower = False

    def __init__(self, prefill: Prefill, sites: Sequence[NumberedSite]) -> None:
        self.prefill = prefill
        self.sites = sites

    def open(self) -> None:
        """Act before the model runs."""

    def close(self) -> None:
        """Undo what `open` did; it may not have been called."""

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Note queries and keys of the tower's block that runs."""

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Act where the decoder stack is entered.

        Args:
            kwargs: arguments of the decoder stack.
            features: (units, D) what went into the projector; None if nobody reads it, or there are no pictures.

        Returns:
            The arguments that take their place.
        """
        del features
        return kwargs

    def layers(self) -> Sequence[int]:
        """Return the decoder layers in front of which these sites act."""
        return ()

    def reach(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
        """Act in front of a decoder layer.

        Args:
            layer: its number.
            hidden: (B, M, D) what enters it.
            rotary: tables of the positions that it was handed; empty for the final norm.

        Returns:
            The states (B, M', D) that enter it instead.
        """
        del layer, rotary
        return hidden

    def work(self, row: int) -> Work:
        """Return what these sites changed in the cost of a row before the decoder."""
        del row
        return NO_WORK
