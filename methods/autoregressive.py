"""Autoregressive decoding: the target says one token after another, and nobody drafts.

The baseline that every decoder's speed-up is measured against. It goes through the same loop, caches and clocks as they
do, so that a speed-up compares ways of decoding and not two programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from espalier.methods.base import Decoder, Source


@dataclass(frozen=True)
class Autoregressive(Decoder):
    """Decodes with the target alone."""

    source: ClassVar[Source] = "nobody"
