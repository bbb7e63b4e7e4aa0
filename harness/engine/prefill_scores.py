"""What one call of `generate` shows of its prefill: attention in every decoder layer, and the scores of the method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.harness.engine.attention_probe import last_row
from espalier.harness.engine.layout import Stage


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
