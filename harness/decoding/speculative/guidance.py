"""What passes from the target's prefill to the draft's: two reducers, one that only looks and one that only obeys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.methods.base import (
    Decoder,
    MethodError,
    Need,
    Plan,
    Positions,
    Site,
    TokenReducer,
    View,
)
from espalier.methods.blame import Blame
from espalier.methods.plans import check_choice, check_plan


@dataclass(frozen=True)
class Guidance:
    """What the target chose for the draft: `kept` (K,) of `n_tokens` visual tokens, or (layers, K) layer by layer."""

    kept: Tensor
    n_tokens: int


@dataclass(frozen=True)
class Onlooker(TokenReducer):
    """Reads the target's prefill for a decoder and removes nothing.

    Attributes:
        decoder: says where to look, and chooses there.
        tell: is given what was chosen, in the middle of the prefill, as soon as it is known.
    """

    decoder: Decoder
    tell: Callable[[Guidance], None]

    @property
    def adaptive(self) -> bool:
        """Keep another count than asked: all."""
        return True

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the decoder's sites."""
        return self.decoder.sites(depth)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return what the decoder reads."""
        return self.decoder.needs(site)

    def answer(self, view: View, keep: int) -> Plan:
        """Return the plan; what goes wrong is nobody's method."""
        return self.plan(view, keep)

    def plan(self, view: View, keep: int) -> Plan:
        """Tell what the decoder chose of one prompt, and keep every token."""
        n_rows, n_tokens, _ = view.tokens.shape
        with Blame(self.decoder, "choose", view.site):
            chosen = self.decoder.choose(view, keep)
            check_choice(chosen, view, self.decoder.source == "cache")
        (chosen,) = chosen
        # One transfer: the draft lives on another device, or in another process.
        self.tell(Guidance(chosen.cpu(), n_tokens))
        return Plan(torch.arange(n_tokens, device=view.tokens.device).expand(n_rows, n_tokens))


@dataclass(frozen=True)
class Given(TokenReducer):
    """Keeps what it is told, before the first layer.

    Attributes:
        wait: returns what the target chose; it is asked once the tower has run, and may take its time.
    """

    wait: Callable[[], Guidance]

    @property
    def adaptive(self) -> bool:
        """Keep another count than asked: as many as told."""
        return True

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        del depth
        return (Site("prefix"),)

    def positions(self, depth: int) -> Positions:
        """Close the gaps: papers say nothing, and a prompt of this length is what the draft was trained on."""
        del depth
        return "renumbered"

    def answer(self, view: View, keep: int) -> Plan:
        """Return the plan, checked; what goes wrong before is nobody's method."""
        plan = self.plan(view, keep)
        check_plan(plan, view, None)
        return plan

    def plan(self, view: View, keep: int) -> Plan:
        """Keep what was told, of one prompt.

        Raises:
            MethodError: target and draft do not see the same visual tokens.
        """
        del keep
        told, n_tokens = self.wait(), view.tokens.shape[1]
        if told.n_tokens != n_tokens:
            raise MethodError(
                f"method.draft: the draft sees {n_tokens} visual tokens, the target {told.n_tokens}; "
                "valid: models with the same frames and the same grid"
            )
        return Plan(told.kept.to(view.tokens.device).unsqueeze(0))
