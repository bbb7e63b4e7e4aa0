"""Layout of a batch: its images and videos, where tokens lie, which are alive at a layer, and what a query sees."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from espalier.harness.cost.facts import NO_WORK, Work
from espalier.harness.errors import UserError
from espalier.harness.specs.comparable import grouped
from espalier.harness.specs.run_spec import Separators


class Visibility(ABC):
    """The keys that each query sees, by their slots."""

    @abstractmethod
    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return (..., R, n_keys): whether the query in each slot of `queries` (R,) or (B, R) sees each key."""

    @abstractmethod
    def seen_by(self, valid: Tensor) -> Tensor:
        """Return how many valid queries see each key of (B, S), at least 1; broadcastable to (B, S)."""


@dataclass(frozen=True)
class Causal(Visibility):
    """A query sees the keys up to its own."""

    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return whether each key is at or before its query."""
        return _slots(n_keys, queries) <= queries.unsqueeze(-1)

    def seen_by(self, valid: Tensor) -> Tensor:
        """Count for key j the valid queries at j or later."""
        return valid.flip(1).cumsum(1).flip(1).clamp(min=1)


@dataclass(frozen=True)
class Bidirectional(Visibility):
    """Every query sees every key."""

    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return True everywhere."""
        return torch.ones(*queries.shape, n_keys, dtype=torch.bool, device=queries.device)

    def seen_by(self, valid: Tensor) -> Tensor:
        """Count all valid queries, (B, 1)."""
        return valid.sum(1, keepdim=True).clamp(min=1)


@dataclass(frozen=True, eq=False)
class VisualBlocks(Visibility):
    """A query sees the keys up to its own and all of its block; with a window, no key that lies further back.

    Attributes:
        blocks: (B, S) number of each slot's block, -1 outside blocks.
        positions: (B, S) of each slot.
        window: positions that a query sees back, its own included; None: all.
        span: bound of the positions, known on the host.
        cut: whether a window hides tokens of the query's block too.
    """

    blocks: Tensor
    positions: Tensor
    window: int | None = None
    span: int = 0
    cut: bool = True

    def sees(self, queries: Tensor, n_keys: int) -> Tensor:
        """Return (B, R, n_keys): whether each key is close enough, and up to its query or in the same block."""
        blocks, positions = self.blocks.to(queries.device), self.positions.to(queries.device)
        slots = queries.clamp(min=0).expand(blocks.shape[0], -1)
        own_block = blocks.gather(1, slots).unsqueeze(2)
        visible = _slots(n_keys, queries) <= slots.unsqueeze(2)
        together = (own_block == blocks.unsqueeze(1)) & (own_block >= 0)
        if self.window is None:
            return visible | together
        farthest = positions.gather(1, slots).unsqueeze(2) - self.window
        near = positions.unsqueeze(1) > farthest
        return (visible | together) & near if self.cut else visible & near | together

    def gathered(self, index: Tensor) -> VisualBlocks:
        """Return the blocks of a shortened batch with the slots `index` (B, M)."""
        blocks, positions = self.blocks.gather(1, index), self.positions.gather(1, index)
        return replace(self, blocks=blocks, positions=positions)

    def on(self, device: torch.device) -> VisualBlocks:
        """Return the blocks on a device."""
        return replace(self, **moved(self, device))

    def seen_by(self, valid: Tensor) -> Tensor:
        """Count the valid queries, 256 at a time. Cost: O(B S^2)."""
        n_slots = valid.shape[1]
        counts = torch.zeros(valid.shape, dtype=torch.long, device=valid.device)
        for block in _slots(n_slots, valid).split(256):
            counts += (self.sees(block, n_slots) & valid[:, block].unsqueeze(2)).sum(1)
        return counts.clamp(min=1)


#: Default visibility of a text stack.
CAUSAL = Causal()


def visibility_of(config: Any) -> Visibility:
    """Return the visibility of a text stack, read from its configuration as the library reads it (`is_causal`)."""
    return CAUSAL if getattr(config, "is_causal", True) else Bidirectional()


def _slots(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


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
        return self if self.valid.device == device else replace(self, **moved(self, device))


def moved(holder: Any, device: torch.device) -> dict[str, Any]:
    """Return the tensors among a dataclass's fields on `device`, by name."""
    values = {attribute.name: getattr(holder, attribute.name) for attribute in fields(holder)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


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
            one type (harness/engine/layer_inputs.py).
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
            for name, value in moved(self, device).items():
                setattr(self, name, value)
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


def fill_padding(slots: Tensor, counts: Sequence[int], filler: int) -> Tensor:
    """Replace the right padding of (B, N) slots by `filler`."""
    if all(count == slots.shape[1] for count in counts):
        return slots
    places = torch.arange(slots.shape[1], device=slots.device)
    return torch.where(torch.stack([places < count for count in counts]), slots, filler)


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
    return list(grouped((key, row) for row, key in enumerate(keys)).items())


@dataclass(frozen=True, eq=False)
class VisualItem:
    """The placeholders of one image or video in the prompt, in sequence order.

    Attributes:
        grid: (n, 4) image or frame (from 0), view, row and column of each placeholder.
        source: (n, S) projector units that each one is a mixture of, numbered over all calls of the projector.
        share: (n, S) weight of each; None for one unit each.
        prunable: (n,) False for newline and separator tokens; None if all are prunable.
        tile: (n,) crop of the image that each one lies in, 0 for the global view; None: the view.
        work: cost before the decoder.
    """

    grid: Tensor
    source: Tensor
    share: Tensor | None = None
    prunable: Tensor | None = None
    tile: Tensor | None = None
    work: Work = NO_WORK

    def __len__(self) -> int:
        """Return the number of placeholders."""
        return self.grid.shape[0]

    @property
    def choice(self) -> Tensor:
        """(n,) whether each one may be pruned."""
        return torch.ones(len(self), dtype=torch.bool) if self.prunable is None else self.prunable

    @property
    def weights(self) -> Tensor:
        """(n, S) weight of each unit."""
        return torch.ones(self.source.shape) if self.share is None else self.share


def rectangle(images: int, height: int, width: int, view: int = 0) -> Tensor:
    """Return (images * height * width, 4) coordinates of full grids in raster order, image by image."""
    axes = (torch.arange(images), torch.tensor([view]), torch.arange(height), torch.arange(width))
    return torch.cartesian_prod(*axes)


def framed_rectangle(height: int, width: int, newlines: bool = True) -> tuple[Tensor, Tensor]:
    """Return row and column (n, 2) of a grid between a begin and an end, with a newline after each row or without.

    Begin and end take the places of the first cell and of the last. Also returns (n,): False for all but cells.
    """
    cells = torch.cartesian_prod(torch.arange(height), torch.arange(width + int(newlines)))
    places = torch.cat([cells[:1], cells, cells[-1:]])
    prunable = places[:, 1] < width
    prunable[0] = prunable[-1] = False
    return places, prunable


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Return integer or boolean tensors on the host, by one copy.

    Tensors of further cards go through the first one's.
    """
    device = tensors[0].device
    flat = torch.cat([tensor.to(device, torch.long).flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        part.view(tensor.shape).to(tensor.dtype)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays of int64 on a device, by one copy."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def read_layout(
    ids: Tensor,
    valid: Tensor,
    items: Mapping[int, Sequence[VisualItem]],
    separators: Separators = "keep",
) -> Layout:
    """Find every image's and video's placeholders in a batch of prompts.

    Args:
        ids: (B, L) prompts.
        valid: (B, L) False for padding.
        items: for each placeholder id, the batch's images or videos in the order of their placeholders.
        separators: whether newline and separator tokens stay, or count as ordinary visual tokens.

    Raises:
        UserError: a row with placeholders that do not add up to complete images or videos.

    Cost: one transfer to the host, tables on the host, one transfer back, and one of the weights of mixed units.
    """
    host_ids, host_valid = (tensor.numpy() for tensor in to_host(ids, valid))
    units = max(
        (item.source.shape[1] for items_of_token in items.values() for item in items_of_token),
        default=1,
    )
    queues = {token: deque(items_of_token) for token, items_of_token in items.items()}
    rows = [
        _row(n, host_ids[n], host_valid[n], queues, units, separators)
        for n in range(host_ids.shape[0])
    ]
    unplaced = sum(map(len, queues.values()))
    if unplaced:
        raise UserError(
            f"model: {unplaced} images or videos of the batch have no placeholder in their prompts; valid: the image "
            "token of the checkpoint's config.json, and a template that writes it for each of them"
        )

    def stack(name: str, filler: int = 0) -> np.ndarray:
        columns = [getattr(row, name) for row in rows]
        width = max(len(column) for column in columns)
        padded = np.full((len(rows), width, *columns[0].shape[1:]), filler, dtype=columns[0].dtype)
        for column, target in zip(columns, padded, strict=True):
            target[: len(column)] = column
        return padded

    names = ("visual", "grid", "picture", "tile", "source")
    arrays = [*map(stack, names), stack("words", -1)]
    visual, grid, picture, tile, source, words = to_device(arrays, ids.device)
    return Layout(
        valid=valid,
        visual=visual,
        counts=tuple(len(row.visual) for row in rows),
        text=tuple(row.length - len(row.visual) for row in rows),
        special=tuple(row.length - len(row.visual) - len(row.words) for row in rows),
        words=words,
        grid=grid,
        picture=picture,
        tile=tile,
        source=source,
        share=torch.from_numpy(stack("share")).to(ids.device) if units > 1 else None,
        blended=tuple(row.blended for row in rows),
        work=tuple(row.work for row in rows),
    )


@dataclass(frozen=True, eq=False)
class _LayoutRow:
    """One row of a layout, before padding; in numpy arrays, which are several times faster for many small steps."""

    length: int
    words: np.ndarray
    visual: np.ndarray
    grid: np.ndarray
    picture: np.ndarray
    tile: np.ndarray
    source: np.ndarray
    share: np.ndarray
    blended: bool
    work: Work


def _row(
    number: int,
    ids: np.ndarray,
    valid: np.ndarray,
    queues: Mapping[int, deque[VisualItem]],
    units: int,
    separators: Separators,
) -> _LayoutRow:
    """Take the row's images and videos from the queues and find their positions."""
    placed: list[tuple[np.ndarray, VisualItem]] = []
    words = valid
    for token, queue in queues.items():
        placeholder = ids == token
        words = words & ~placeholder
        places = (placeholder & valid).nonzero()[0]
        start = 0
        while queue and start + len(queue[0]) <= len(places) and start < len(places):
            item = queue.popleft()
            placed.append((places[start : start + len(item)], item))
            start += len(item)
        if start != len(places):
            raise UserError(
                f"chat {number} of the batch has {len(places)} placeholders where its images or videos fill {start}"
            )
    # Images come before videos in the queues; in the prompt they may alternate.
    placed.sort(key=lambda entry: int(entry[0][0]))
    row_items = [item for _, item in placed]
    grids, image = [np.zeros((0, 4), dtype=np.int64)], 0
    work = Work()
    for item in row_items:
        grid = item.grid.numpy()
        grids.append(grid + np.array([image, 0, 0, 0]))
        image += int(grid[-1, 0]) + 1
        work = work.plus(item.work)
    prunable = np.concatenate(
        [np.ones(0, dtype=bool), *(item.choice.numpy() for item in row_items)]
    )
    if separators == "candidates":
        prunable[:] = True

    def join(parts: list[np.ndarray], like: np.ndarray) -> np.ndarray:
        return cast("np.ndarray", np.concatenate([like, *parts])[prunable])

    no_slots, no_units = np.zeros(0, dtype=np.int64), np.zeros((0, units), dtype=np.int64)
    tiles = [item.grid[:, 1] if item.tile is None else item.tile for item in row_items]
    return _LayoutRow(
        length=int(valid.sum()),
        words=words.nonzero()[0],
        visual=join([places for places, _ in placed], no_slots),
        grid=np.concatenate(grids)[prunable],
        picture=join([np.full(len(item), n) for n, item in enumerate(row_items)], no_slots),
        tile=join([tile.numpy() for tile in tiles], no_slots),
        source=join([_pad_units(item.source, units) for item in row_items], no_units),
        share=join(
            [_pad_units(item.weights.float(), units) for item in row_items],
            no_units.astype(np.float32),
        ),
        blended=any(item.share is not None for item in row_items),
        work=work,
    )


def _pad_units(table: Tensor, units: int) -> np.ndarray:
    """Return (n, units) of (n, S), zero where an item mixes fewer units."""
    if table.shape[1] == units:
        return table.numpy()
    return np.pad(table.numpy(), ((0, 0), (0, units - table.shape[1])))


def mean_of_blocks(values: Tensor, units: int) -> Tensor:
    """Return (views * units^2, ...): of square views (views, patches, ...), the mean of the patches of each unit."""
    fold = math.isqrt(values.shape[1]) // units
    blocks = values.view(len(values), units, fold, units, fold, *values.shape[2:])
    return blocks.mean((2, 4)).flatten(0, 2)
