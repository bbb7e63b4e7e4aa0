"""The base of methods that drop visual tokens step by step while a diffusion model denoises its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from methods.base import TokenReducer


@dataclass(frozen=True)
class DenoisingReducer(TokenReducer):
    """Answers with a `Plan` at each of its sites in every denoising step; `View.step` is the step's number."""

    in_one_prefill: ClassVar[bool] = False
