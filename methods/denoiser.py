"""The base of methods that drop visual tokens step by step while a diffusion model denoises its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from espalier.methods.base import Method, TokenReducer
from espalier.methods.select.entries import Entries


@dataclass(frozen=True)
class DenoisingReducer(TokenReducer):
    """Returns a `Plan` at each of its sites in every denoising step; `View.step` is the step's number.

    With a cached prompt a step has no states of visual tokens. A method that can act on the cache's entries instead
    sets `merges_entries`, and implements `chosen` for its site's layer and `merged` for every layer after it; a step
    may keep the last choice (`every`).
    """

    in_one_prefill: ClassVar[bool] = False

    #: Whether it also acts on a cached prompt.
    merges_entries: ClassVar[bool] = False

    #: Steps for which a choice among a cached prompt's entries is kept, and what was merged by it.
    every = 1

    #: First sites at which the first step keeps every token; at the others it has the budget of later steps.
    later_sites: ClassVar[int] = 0

    @property
    def takes_newlines(self) -> bool:
        """Whether newlines and separators of pictures are visual tokens, as with engine.separators=candidates."""
        return False

    @property
    def rounds_down(self) -> bool:
        """Whether counts of tokens that stay are rounded down."""
        return False

    @property
    def even(self) -> bool:
        """Whether every step after the first removes the same share, the run's ratio."""
        names = ("ratios", "block_ratios", "cached_ratios")
        return all(getattr(type(self), name) is getattr(DenoisingReducer, name) for name in names)

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share of the visual tokens that is gone after the last site, at each of `steps` steps.

        No token is unveiled before the first step, so there are no deciders and every token stays; the mean of the
        other steps is `ratio`.

        Raises:
            MethodError: the method has no such ratio.
        """
        return (0.0, *(ratio,) * (steps - 1))

    def block_ratios(self, ratio: float, steps: int, blocks: int) -> tuple[float, ...]:
        """Return the shares of an answer in `blocks` blocks of equally many steps, `steps` together."""
        del blocks
        return self.ratios(ratio, steps)

    def cached_ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the shares for a cached prompt: the same, unless the released code differs there."""
        return self.ratios(ratio, steps)

    def chosen(self, attention: Tensor, keep: int) -> Tensor:
        """Return (B, keep) ascending indices of the visual tokens that stay.

        Args:
            attention: (B, N) the deciders' attention to the cached entry of each visual token in the site's layer.
            keep: 1 to N.
        """
        raise NotImplementedError(f"{type(self).__name__} does not act on cached entries")

    def merged(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Return keys, without rotary positions, and values of one layer after merging.

        They are (H, K, D), of the visual tokens that stay, or (H, S - N + K, D), of all entries that stay.
        """
        raise NotImplementedError(f"{type(self).__name__} does not act on cached entries")


def as_denoiser(method: Method) -> DenoisingReducer | None:
    """Return a method that acts at every denoising step; None if it is of another kind."""
    return method if isinstance(method, DenoisingReducer) else None
