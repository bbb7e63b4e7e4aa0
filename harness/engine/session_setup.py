"""Setup of a session: one method on one model, how to run it, and the protocols of cache eviction.

harness/engine/eviction.py implements the protocols. The engine depends on these only, so that the code of eviction is
part of the runs that evict, and of no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.attention_probe import last_row
from espalier.harness.engine.layout import Stage
from espalier.harness.engine.model_parts import ModelParts
from espalier.harness.engine.signals.producer import Signals
from espalier.methods.base import Site, TokenReducer
from espalier.methods.checks import Conditions


class PassEviction(Protocol):
    """Eviction from the cache of one pass."""

    @property
    def held_visual(self) -> Sequence[Sequence[int]]:
        """Visual entries that each layer holds, for each row of the batch; filled by `shorten`."""

    @property
    def held_special(self) -> Sequence[Sequence[int]]:
        """Newline and separator entries that each layer holds, for each row; empty if all of them stay."""

    def score_layer(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Score a layer from its queries (B, H, M, D) and keys (B, H_kv, M, D)."""

    def shorten(self, cache: Any) -> list[Stage]:
        """Shorten the cache and return each layer's stage for the decoding steps."""


class CacheEvictor(Protocol):
    """Cache eviction of a session, after each prefill."""

    @property
    def acts(self) -> bool:
        """Whether it may evict entries; if not, the cache stays unchanged."""

    def begin(self, prefill: Any, depth: int) -> PassEviction:
        """Return the eviction of one pass: a `Prefill` of a decoder of `depth` layers."""


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
        by_item: whether the method chooses in each picture and video by itself.
        collector: collects scores and attention of each prefill; None: nothing does.
        conditions: on values of the method, read together with the outcome of a pass.
    """

    adapter: ModelParts
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
    by_item: bool = False
    collector: PrefillScores | None = None
    conditions: Conditions = field(default_factory=Conditions)


class PrefillScores:
    """Collects values of visual tokens during one prefill; NaN stands for tokens that had none, such as dropped ones.

    Attributes:
        attention: of each decoder layer (B, N) in fp32, on the CPU: attention that the prompt's last token pays each
            visual token, mean over heads; NaN in layers of linear attention. N is the largest number of visual tokens
            of a row.
        scores: (layer, (B, N)) of each place where the method states scores, first to last: those of its plans, or of
            the entries of a layer's cache, mean over heads. A site before the decoder counts as layer 0.
    """

    def __init__(self) -> None:
        self.attention: list[Tensor] = []
        self.scores: list[tuple[int, Tensor]] = []
        self._shape = (0, 0)

    def begin(self, rows: int, width: int, depth: int) -> None:
        """Start a prefill of `rows` rows with up to `width` visual tokens through `depth` layers."""
        self.scores, self._shape = [], (rows, width)
        self.attention = [torch.full(self._shape, torch.nan) for _ in range(depth)]

    def watch(
        self, layer: int, stage: Stage, visible: Tensor, query: Tensor, key: Tensor, scaling: float
    ) -> None:
        """Keep the attention of a layer, to the slots `visible` (B, M) to the prompt's last token.

        Cost: one row, O(H S Dh), and its transfer to the CPU.
        """
        row = last_row(query, key, scaling, visible)
        values = row.gather(1, stage.slots)
        self._write(self.attention[layer], range(len(row)), stage.origin, values, stage.counts)

    def add(self, layer: int, rows: Sequence[int], origin: Tensor, scores: Tensor) -> None:
        """Keep the scores (b, n) of the visual tokens `origin` (b, n) of some rows."""
        if not self.scores or self.scores[-1][0] != layer:
            self.scores.append((layer, torch.full(self._shape, torch.nan)))
        self._write(self.scores[-1][1], rows, origin, scores, [origin.shape[1]] * len(rows))

    @staticmethod
    def _write(
        table: Tensor, rows: Sequence[int], origin: Tensor, values: Tensor, counts: Sequence[int]
    ) -> None:
        origin, values = origin.cpu(), values.float().cpu()
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            table[row, origin[number, :count]] = values[number, :count]
