"""Guidance from the target's prefill to the draft's: one reducer that reads the choice, one that applies it."""

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
from espalier.methods.checks import read
from espalier.methods.plans import check_choice, checked_plan


@dataclass(frozen=True)
class Guidance:
    """The target's choice for the draft: `kept` (K,) of `n_tokens` visual tokens, or (layers, K) per layer."""

    kept: Tensor
    n_tokens: int


@dataclass(frozen=True)
class GuidanceReader(TokenReducer):
    """Reads the target's prefill for a decoder and removes nothing.

    Attributes:
        decoder: defines the sites and makes the choice.
        on_choice: called with the choice during the prefill, as soon as it is known.
    """

    decoder: Decoder
    on_choice: Callable[[Guidance], None]

    @property
    def draws(self) -> bool:
        """Whether the decoder does."""
        return self.decoder.draws

    @property
    def adaptive(self) -> bool:
        """Keep all tokens, whatever the budget."""
        return True

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the decoder's sites."""
        return self.decoder.sites(depth)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the signals that the decoder reads."""
        return self.decoder.needs(site)

    def answer(self, view: View, keep: int) -> Plan:
        """Return the plan; errors here are not attributed to a method."""
        return self.plan(view, keep)

    def plan(self, view: View, keep: int) -> Plan:
        """Pass on the decoder's choice for one prompt, and keep every token."""
        n_rows, n_tokens, _ = view.tokens.shape
        with Blame(self.decoder, "choose", view.site):
            chosen = self.decoder.choose(view, keep)
            check_choice(chosen, view, keep, self.decoder.source == "cache")
            # One transfer: the draft is on another device, or in another process.
            (chosen,) = read(chosen)[0]
        self.on_choice(Guidance(chosen, n_tokens))
        return Plan(torch.arange(n_tokens, device=view.tokens.device).expand(n_rows, n_tokens))


@dataclass(frozen=True)
class GuidedReducer(TokenReducer):
    """Keeps the tokens that the target chose, before the first layer.

    Attributes:
        wait: returns the target's choice; called after the tower has run, and may block.
    """

    wait: Callable[[], Guidance]

    @property
    def adaptive(self) -> bool:
        """Keep as many tokens as the target chose, whatever the budget."""
        return True

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the prefix."""
        return (Site("prefix"),)

    def positions(self, depth: int) -> Positions:
        """Renumber positions: papers do not specify them, and the draft was trained on prompts of this length."""
        return "renumbered"

    def answer(self, view: View, keep: int) -> Plan:
        """Return the checked plan; errors before the check are not attributed to a method."""
        return checked_plan(self.plan(view, keep), view, None)

    def plan(self, view: View, keep: int) -> Plan:
        """Keep the chosen tokens of one prompt.

        Raises:
            MethodError: target and draft do not see the same visual tokens.
        """
        guidance, n_tokens = self.wait(), view.tokens.shape[1]
        if guidance.n_tokens != n_tokens:
            raise MethodError(
                f"method.draft: the draft sees {n_tokens} visual tokens, the target {guidance.n_tokens}; "
                "valid: models with the same frames and the same grid"
            )
        return Plan(guidance.kept.to(view.tokens.device).unsqueeze(0))
