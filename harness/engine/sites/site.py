"""Common interface of all kinds of sites: a pass calls them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from espalier.harness.cost.row_work import NO_WORK
from espalier.methods.views import Site

if TYPE_CHECKING:
    from espalier.harness.cost.row_work import Work
    from espalier.harness.engine.prefill import Prefill

Arguments = dict[str, Any]

#: A site and its number among all of the method's.
NumberedSite = tuple[int, Site]


class Sites:
    """Consecutive sites of one kind, in one pass. A kind overrides the moments at which it acts.

    Args:
        prefill: the batch.
        sites: these sites, first to last.
    """

    #: Whether the kind reads the projector's input.
    reads_features = False
    #: Whether the kind acts before the point where prompts are stored (harness/engine/prompt.py).
    in_tower = False

    def __init__(self, prefill: Prefill, sites: Sequence[NumberedSite]) -> None:
        self.prefill = prefill
        self.sites = sites

    def open(self) -> None:
        """Act before the model runs."""

    def close(self) -> None:
        """Undo what `open` did; it may not have been called."""

    def watch(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Store queries and keys of the running tower block."""

    def enter(self, kwargs: Arguments, features: Tensor | None) -> Arguments:
        """Act at the input of the decoder stack.

        Args:
            kwargs: arguments of the decoder stack.
            features: (units, D) input of the projector; None if not needed, or without images.

        Returns:
            The new arguments.
        """
        del features
        return kwargs

    def layers(self) -> Sequence[int]:
        """Return the decoder layers before which these sites act."""
        return ()

    def reach(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
        """Act before a decoder layer.

        Args:
            layer: its number.
            hidden: (B, M, D) states that enter it.
            rotary: tables of the positions that it was given; empty for the final norm.

        Returns:
            The new states (B, M', D).
        """
        del layer, rotary
        return hidden

    def work(self, row: int) -> Work:
        """Return the change in a row's cost before the decoder."""
        del row
        return NO_WORK
