"""The base of methods that drop visual tokens step by step while a diffusion model denoises its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.base import TokenReducer


@dataclass(frozen=True)
class DenoisingReducer(TokenReducer):
    """Answers with a `Plan` at each of its sites in every denoising step; `View.step` is the step's number."""

    in_one_prefill: ClassVar[bool] = False

    def ratios(self, ratio: float, steps: int) -> tuple[float, ...]:
        """Return the share of the visual tokens that the last site leaves out at each of `steps` steps.

        Nobody has been unveiled before the first step, so there is nobody to decide and every token stays; behind it
        the mean is `ratio`.

        Raises:
            MethodError: the method has no such ratio.
        """
        return (0.0, *(ratio,) * (steps - 1))
