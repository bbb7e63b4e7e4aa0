"""Autoregressive decoding: the target generates one token at a time, without a draft.

The baseline of every decoder's speed-up. It uses the same loop, caches and clocks, so that a speed-up compares ways of
decoding and not two programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espalier.methods.base import Decoder, Source


@dataclass(frozen=True)
class Autoregressive(Decoder):
    """Decodes with the target alone."""

    source: ClassVar[Source] = "nobody"
