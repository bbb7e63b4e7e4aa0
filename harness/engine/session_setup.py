"""Setup of a session: one method on one model, and how to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.evictor import CacheEvictor
from espalier.harness.engine.model_parts import Parts
from espalier.harness.engine.signals import Signals
from espalier.methods.base import Site, TokenReducer


@dataclass(frozen=True, eq=False)
class SessionSetup:
    """One method on one model, the same for all passes of a session.

    Attributes:
        adapter: the model's parts.
        method: the reducer.
        budget: rule and ratio.
        seed: run seed.
        emulate: whether dropped tokens are hidden by masks instead of removed.
        renumber: whether gaps in the positions are closed after every site.
        timed: whether phases are timed.
        sites: where the method shortens the prompt, first to last.
        decode_site: where it chooses what decoding steps attend to, or None.
        signals: captures the signals that the method reads.
        extra_blocks: blocks of the tower that run for the method only.
        idle_blocks: blocks of the tower with unused output.
        evicting: cache eviction after the prefill; None: no eviction.
    """

    adapter: Parts
    method: TokenReducer
    budget: Budget
    seed: int
    emulate: bool
    renumber: bool
    timed: bool
    sites: tuple[Site, ...]
    decode_site: Site | None
    signals: Signals
    extra_blocks: Sequence[nn.Module]
    idle_blocks: Sequence[nn.Module]
    evicting: CacheEvictor | None = None
