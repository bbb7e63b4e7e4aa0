"""The base of methods that drop visual tokens step by step while a diffusion model denoises its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from espalier.methods.base import Method, TokenReducer
from espalier.methods.select.entries import Entries


@dataclass(frozen=True)
class DenoisingReducer(TokenReducer):
    """Answers with a `Plan` at each of its sites in every denoising step; `View.step` is the step's number.

    Where the prompt is cached there are no states of visual tokens in a step. A method that can act on the cache's
    entries instead says so, and answers with `chosen` at its site's layer and with `merged` in every layer behind it.
    """

    in_one_prefill: ClassVar[bool] = False

    #: Whether it acts on a cached prompt, too.
    merges_entries: ClassVar[bool] = False

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share of the visual tokens that the last site leaves out at each of `steps` steps.

        Nobody has been unveiled before the first step, so there is nobody to decide and every token stays; behind it
        the mean is `ratio`.

        Raises:
            MethodError: the method has no such ratio.
        """
        return (0.0, *(ratio,) * (steps - 1))

    def cached_ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the shares where the prompt is cached: the same, unless the released code does otherwise there."""
        return self.ratios(ratio, steps)

    def chosen(self, attention: Tensor, keep: int) -> Tensor:
        """Return (B, keep) ascending indices of the visual tokens that stay.

        Args:
            attention: (B, N) what the deciders pay the cached entry of each visual token in the site's layer.
            keep: 1 to N.
        """
        raise NotImplementedError(f"{type(self).__name__} does not act on cached entries")

    def merged(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Return keys and values (H, S - N + K, D) of one layer in which fewer tokens are left."""
        raise NotImplementedError(f"{type(self).__name__} does not act on cached entries")


def as_denoiser(method: Method) -> DenoisingReducer | None:
    """Return a method that is asked at every denoising step; None if it is of another kind."""
    return method if isinstance(method, DenoisingReducer) else None
