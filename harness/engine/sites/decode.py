"""Choice at each decoding step of the visual cache entries that the upper layers attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.harness.engine.attention_probe import last_row
from espalier.harness.engine.layout import groups, take
from espalier.methods.base import MethodError, Need, View
from espalier.methods.blame import Blame
from espalier.methods.plans import check_attended

if TYPE_CHECKING:
    from espalier.harness.engine.layout import Layout, Stage
    from espalier.harness.engine.reduce import Rows
    from espalier.methods.base import Attended, Site, TokenReducer

#: Signals that a method may read at a decoding step.
STEP_NEEDS = frozenset({Need("last_attention")})


class DecodeStepMask:
    """Calls a method at every decoding step, and turns its answers into hidden slots.

    Nothing leaves the cache, since a later step may need any entry again: masks hide the entries left out at a step.

    Args:
        method: the reducer.
        site: its decode site.
        layout: of the batch.
        stage: tokens alive in the layer below the site.
    """

    def __init__(self, method: TokenReducer, site: Site, layout: Layout, stage: Stage) -> None:
        self._method = method
        self._site = site
        self._stage = stage
        self._keys = tuple(need.key for need in method.needs(site))
        self._shape = layout.visual.shape
        self._groups: list[tuple[Rows, int, Tensor]] = []
        row_groups = groups(stage.counts)
        for n_tokens, members in row_groups:
            if n_tokens:
                rows: Rows = slice(None) if len(row_groups) == 1 else members
                grid = layout.on(stage.origin.device).grid[rows]
                self._groups.append(
                    (rows, n_tokens, take(grid, stage.origin[rows][:, :n_tokens], -2))
                )
        self._last_answers: list[Attended | None] = [None] * len(self._groups)
        self._slots: dict[int, Tensor] = {}
        self._attended: Tensor | None = None
        self._counts: list[Tensor] = []

    def hides(self, layer: int) -> bool:
        """Return whether a decoder layer has to leave out entries at this step."""
        return layer >= self._site.layer and self._attended is not None

    def choose(self, query: Tensor, key: Tensor, scaling: float) -> None:
        """Get the method's choice, from the new token's attention in the layer below its site.

        Args:
            query: (B, H, 1, Dh) of the new token, rotary positions applied.
            key: (B, H_kv, S, Dh) of all tokens in that layer's cache, the new one included.
            scaling: factor of the logits.

        Cost: O(H S Dh) and the method's cost.
        """
        stage = self._stage.move(query.device)
        new_valid = stage.valid.new_ones(key.shape[0], key.shape[2] - stage.valid.shape[1])
        attention = last_row(query, key, scaling, torch.cat([stage.valid, new_valid], 1))
        attention = take(attention, stage.slots, -1)
        attended = torch.ones(self._shape, dtype=torch.bool, device=attention.device)
        counts = torch.zeros(self._shape[0], dtype=torch.long, device=attention.device)
        for number, (rows, n_tokens, grid) in enumerate(self._groups):
            token_attention = attention[rows][:, :n_tokens]
            no_tokens = token_attention.new_zeros(*token_attention.shape, 0)
            view = View(
                self._site,
                no_tokens,
                grid.to(token_attention.device),
                dict.fromkeys(self._keys, token_attention),
            )
            with Blame(self._method, "attend", self._site):
                answer = self._method.attend(view, self._last_answers[number])
                check_attended(answer, view)
            self._last_answers[number] = answer
            if answer.entries is None:
                counts[rows] = n_tokens
                continue
            counts[rows] = answer.entries.sum(dim=1)
            attended[rows] = attended[rows].scatter(
                1, stage.origin[rows][:, :n_tokens], answer.entries
            )
        attends_all = all(last is not None and last.entries is None for last in self._last_answers)
        self._attended = None if attends_all else attended
        self._counts.append(counts)

    def valid(self, stage: Stage) -> Tensor:
        """Return (B, M): the slots of a stage that this step attends to. Cost: O(B M), no synchronisation."""
        assert self._attended is not None  # called only if `hides`
        n_slots, device = stage.valid.shape[1], stage.valid.device
        if id(stage) not in self._slots:
            place = torch.arange(stage.slots.shape[1], device=device)
            real = place < torch.tensor(stage.counts, device=device).unsqueeze(1)
            # Right-padded entries must not touch a real slot: they are written to an extra column that is cut off.
            self._slots[id(stage)] = torch.where(real, stage.slots, n_slots)
        attended = take(self._attended.to(device), stage.origin, -1)
        slots = self._slots[id(stage)].to(device)
        return torch.nn.functional.pad(stage.valid, (0, 1)).scatter(1, slots, attended)[:, :n_slots]

    def means(self, new_tokens: list[int]) -> list[float | None]:
        """Return the mean entries attended to over each row's steps; None for an answer of a single token.

        Args:
            new_tokens: tokens of each row; the first is the prefill's, and steps after the last do not count.
        """
        if not self._counts:
            return [None] * len(new_tokens)
        counts = torch.stack([step_counts.cpu() for step_counts in self._counts]).double()
        return [
            float(counts[: length - 1, row].mean()) if length > 1 else None
            for row, length in enumerate(new_tokens)
        ]


def decode_site(method: TokenReducer, depth: int) -> Site | None:
    """Return a method's decode site in a decoder of `depth` layers.

    Raises:
        MethodError: it needs signals that a decoding step does not have.
    """
    site = method.decode_site(depth)
    for need in () if site is None else method.needs(site):
        if need not in STEP_NEEDS:
            raise MethodError(
                f"signal {need.key!r} is not available while tokens are generated; valid: last_attention"
            )
    return site
