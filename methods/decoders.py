"""The base of methods that decode speculatively."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from espalier.methods.method import Method

if TYPE_CHECKING:
    from espalier.methods.reducers import TokenReducer
    from espalier.methods.views import Site, View

#: Tokens drafted in a round. auto: the ratio of the measured times of one step of target and draft. best: the number
#: with the highest expected speed by the times and the acceptance of the answers so far.
Window = int | Literal["auto", "best"]

#: Who drafts: nobody (the target decodes alone), a draft model, or the target itself on a part of its cache.
Source = Literal["nobody", "model", "cache"]


@dataclass(frozen=True)
class Decoder(Method):
    """Speculative decoding: who drafts, what the draft sees of the images, how many tokens it proposes, and when.

    The target keeps every token. A decoder reads the target's prefill at its sites and chooses there what the draft
    sees. The budget's ratio is the share of visual tokens that the draft does without.
    """

    drafts: ClassVar[bool] = True
    source: ClassVar[Source] = "model"
    #: Whether drafting goes on while the target verifies.
    overlap: ClassVar[bool] = False

    @property
    def takes_draft(self) -> bool:
        """Whether a second model drafts."""
        return self.source == "model"

    @property
    def window(self) -> Window:
        """Tokens drafted in a round."""
        return 1

    @property
    def text_only(self) -> bool:
        """Whether the draft sees no visual token at all."""
        return False

    @property
    def tree(self) -> tuple[int, ...]:
        """Parents of a drafted tree's tokens, level by level, -1 for a first token; empty: a chain is drafted."""
        return ()

    @property
    def guided(self) -> bool:
        """Whether the target chooses what the draft sees: `sites` has one site, `choose` answers there."""
        return False

    @property
    def draws(self) -> bool:
        """Whether its reducer does."""
        return self.reducer is not None and self.reducer.draws

    @property
    def reducer(self) -> TokenReducer | None:
        """The reducer that the draft applies to its own visual tokens if the target does not guide it; None: none."""
        return None

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return where the target is read: one site if `guided`, else none; layer `depth` means after the last one."""
        del depth
        return ()

    def choose(self, view: View, keep: int) -> Tensor:
        """Choose the visual tokens that the draft sees; a pure function of its arguments.

        Returns:
            (B, keep) visual tokens, ascending; where the draft is the target on a part of its cache,
            (B, layers, keep) of each layer.
        """
        raise NotImplementedError(f"{type(self).__name__} has a site and no `choose`")
