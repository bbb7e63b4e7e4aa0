"""Positions of a batch's visual tokens, and which of them are alive at a decoder layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from espalier.harness.cost.row_work import Work
from espalier.harness.engine.visibility import VisualBlocks

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Layout:
    """Token positions of a left-padded batch, as an adapter reads them from the inputs.

    Rows may hold different numbers of visual tokens; everything with an axis N (or T) is padded on the right, and
    `counts` (or `words` >= 0) marks the real entries of each row.

    Attributes:
        valid: (B, L) True for real tokens, False for padding.
        visual: (B, N) sequence index of each prunable visual token, in sequence order.
        counts: prunable visual tokens of each row.
        text: tokens of each row that are neither padding nor prunable.
        special: newline and separator tokens of each row (part of `text`).
        words: (B, T) sequence index of each token that is neither padding nor a placeholder, -1 where a row has fewer.
        grid: (B, N, 4) image or frame, view, row and column of each visual token. Tokens of one (image, view) are
            contiguous and form one rectangle.
        picture: (B, N) number of the image or video that each visual token belongs to, in the row's order.
        tile: (B, N) crop that each visual token lies in, 0 for a global view.
        source: (B, N, S) projector units that each visual token is a mixture of.
        share: (B, N, S) weight of each; None for one unit each.
        blended: whether a row has tokens that the model blends from several units.
        work: cost of each row before the decoder.
    """

    valid: Tensor
    visual: Tensor
    counts: tuple[int, ...]
    text: tuple[int, ...]
    special: tuple[int, ...]
    words: Tensor
    grid: Tensor
    picture: Tensor
    tile: Tensor
    source: Tensor
    share: Tensor | None
    blended: tuple[bool, ...]
    work: tuple[Work, ...]

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(self.counts)

    def repeat(self, times: int) -> Layout:
        """Repeat every row `times` times in place, as `generate` does for beams."""
        if times == 1:
            return self
        repeated: dict[str, Any] = {}
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if isinstance(value, Tensor):
                repeated[attribute.name] = value.repeat_interleave(times, 0)
            elif value is not None:
                repeated[attribute.name] = tuple(entry for entry in value for _ in range(times))
        return replace(self, **repeated)

    def word_mask(self) -> Tensor:
        """Return (B, L): True for tokens that are neither padding nor placeholders."""
        rows, length = self.valid.shape
        marked = self.valid.new_zeros(rows, length + 1)
        return marked.scatter_(1, self.words + 1, True)[:, 1:]  # -1 marks the first column

    def extended_by(self, count: int) -> Layout:
        """Return the layout of the same prompts, each followed by `count` more tokens that are text but not words."""
        added = self.valid.new_ones(self.rows, count)
        text = tuple(number + count for number in self.text)
        return replace(self, valid=torch.cat([self.valid, added], 1), text=text)

    def on(self, device: torch.device) -> Layout:
        """Return the layout with its tensors on `device`."""
        if self.valid.device == device:
            return self
        moved: dict[str, Any] = {
            attribute.name: getattr(self, attribute.name).to(device)
            for attribute in fields(self)
            if isinstance(getattr(self, attribute.name), Tensor)
        }
        return replace(self, **moved)


def mix(values: Tensor, source: Tensor, share: Tensor | None) -> Tensor:
    """Return (..., D) mixtures of `values` (units, D): the units `source` (..., S) weighted by `share`."""
    if share is None:
        return values[source[..., 0]]
    weight = share.to(torch.promote_types(values.dtype, torch.float32))
    mixed = (values[source].to(weight.dtype) * weight.unsqueeze(-1)).sum(-2)
    return mixed.to(values.dtype)


@dataclass(eq=False)
class Stage:
    """The tokens alive from decoder layer `first` on.

    Attributes:
        first: first decoder layer of this stage.
        valid: (B, M) slots that may be attended to.
        padded: whether any slot is not valid (known on the host, so that layers need not synchronise with the device).
        slots: (B, N) slot of each alive visual token, padded on the right.
        counts: alive visual tokens of each row.
        origin: (B, N) index of each alive visual token among the row's original ones.
        words: (B, T) slot of each text token, -1 where a row has fewer.
        rotary: rotary tables of the slots, set when a layer first receives them.
        mask: attention mask of the prefill, once built.
        blocks: visual tokens that see one another, and positions; None, and the next two empty: the stack has layers of
            one type (harness/engine/layer_types.py).
        masks: by type of layer, once built.
        tables: rotary tables by type of layer, once built.
    """

    first: int
    valid: Tensor
    padded: bool
    slots: Tensor
    counts: tuple[int, ...]
    origin: Tensor
    words: Tensor
    rotary: tuple[Tensor, ...] | None = None
    mask: Tensor | None = field(default=None, repr=False)
    blocks: VisualBlocks | None = field(default=None, repr=False)
    masks: dict[str, Tensor] = field(default_factory=dict, repr=False)
    tables: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def initial(cls, layout: Layout) -> Stage:
        """Return the stage with every token alive."""
        n_slots = layout.valid.shape[1]
        padded = any(v + t != n_slots for v, t in zip(layout.counts, layout.text, strict=True))
        origin = torch.arange(layout.visual.shape[1], device=layout.visual.device)
        return cls(
            first=0,
            valid=layout.valid,
            padded=padded,
            slots=layout.visual,
            counts=layout.counts,
            origin=origin.expand_as(layout.visual),
            words=layout.words,
        )

    def move(self, device: torch.device) -> Stage:
        """Move the stage to `device`, the device of the hidden states: a model may be spread over several devices."""
        if self.valid.device != device:
            for attribute in fields(self):
                value = getattr(self, attribute.name)
                if isinstance(value, Tensor):
                    setattr(self, attribute.name, value.to(device))
            if self.rotary is not None:
                self.rotary = tuple(table.to(device) for table in self.rotary)
            if self.blocks is not None:
                self.blocks = self.blocks.on(device)
            self.masks.clear()
            self.tables.clear()
        return self


def take(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather (B, M) `index` along negative `dim` of a tensor with leading batch axis (size B, or 1 to broadcast)."""
    axis = tensor.dim() + dim
    if index.shape[0] == 1 and tensor.shape[0] == 1:
        return tensor.index_select(axis, index[0])
    shape = list(tensor.shape)
    shape[0], shape[axis] = index.shape
    view = [1] * tensor.dim()
    view[0], view[axis] = index.shape
    expanded = tensor.expand(index.shape[0], *tensor.shape[1:])
    return expanded.gather(axis, index.view(view).expand(shape))


def left_padded(alive: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, bool]:
    """Turn a boolean (B, M) choice with known row sums into slot indices, rows of fewer tokens padded on the left.

    Returns:
        index: (B, max(counts)) chosen slots, ascending, padding clamped to slot 0.
        valid: (B, max(counts)) False for padding.
        padded: whether there is any padding.

    Cost: one sort of M integers a row, no device synchronisation.
    """
    width = max(counts)
    slot = torch.arange(alive.shape[1], device=alive.device)
    chosen = torch.where(alive, slot, -1).sort(dim=1).values[:, -width:]
    return chosen.clamp(min=0), chosen >= 0, any(count != width for count in counts)


def groups(keys: Sequence[Key]) -> list[tuple[Key, list[int]]]:
    """Group row numbers by equal keys, in order of first appearance."""
    members: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    return list(members.items())
