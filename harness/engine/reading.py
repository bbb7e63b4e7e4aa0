"""From a batch of prompts and what stands in them to the layout that the engine works on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from harness.engine.items import Item, Work
from harness.engine.layout import Layout
from harness.errors import UserError


def read_layout(ids: Tensor, valid: Tensor, items: Mapping[int, Sequence[Item]]) -> Layout:
    """Find every image's and video's placeholders in a batch of prompts.

    Args:
        ids: (B, L) prompts.
        valid: (B, L) False for padding.
        items: for each placeholder id, the batch's images or videos in the order of their placeholders.

    Raises:
        UserError: a row whose placeholders do not add up to whole images or videos.

    Cost: one transfer of `ids` to the host, tables on the host, one transfer back.
    """
    host, real = ids.cpu(), valid.cpu()
    units = max((item.source.shape[1] for found in items.values() for item in found), default=1)
    queues = {token: deque(found) for token, found in items.items()}
    rows = [_row(n, host[n], real[n], queues, units) for n in range(host.shape[0])]
    left = sum(map(len, queues.values()))
    if left:
        raise UserError(
            f"{left} images or videos of the batch have no placeholder in their prompts"
        )

    def stack(name: str, filler: int = 0) -> Tensor:
        found = [getattr(row, name) for row in rows]
        return pad_sequence(found, batch_first=True, padding_value=filler).to(ids.device)

    return Layout(
        valid=valid,
        visual=stack("visual"),
        counts=tuple(len(row.visual) for row in rows),
        text=tuple(row.length - len(row.visual) for row in rows),
        special=tuple(row.length - len(row.visual) - len(row.words) for row in rows),
        words=stack("words", -1),
        grid=stack("grid"),
        tile=stack("tile"),
        source=stack("source"),
        share=stack("share") if units > 1 else None,
        blended=tuple(row.blended for row in rows),
        work=tuple(row.work for row in rows),
    )


@dataclass(frozen=True, eq=False)
class _Row:
    """One row of a layout, before padding."""

    length: int
    words: Tensor
    visual: Tensor
    grid: Tensor
    tile: Tensor
    source: Tensor
    share: Tensor
    blended: bool
    work: Work


def _row(
    number: int, ids: Tensor, valid: Tensor, queues: Mapping[int, deque[Item]], units: int
) -> _Row:
    """Take the row's images and videos off the queues and find their places."""
    placed: list[tuple[Tensor, Item]] = []
    words = valid
    for token, queue in queues.items():
        holders = ids == token
        words = words & ~holders
        places = (holders & valid).nonzero()[:, 0]
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
    grids, image = [torch.zeros(0, 4, dtype=torch.long)], 0
    work = Work()
    for _, item in placed:
        grids.append(item.grid + torch.tensor([image, 0, 0, 0]))
        image = int(grids[-1][-1, 0]) + 1
        work = work.plus(item.work)

    def join(parts: list[Tensor], like: Tensor) -> Tensor:
        return torch.cat([like, *parts])[prunable]

    found = [item for _, item in placed]
    everywhere = [torch.ones(0, dtype=torch.bool)]
    everywhere += [
        torch.ones(len(item), dtype=torch.bool) if item.prunable is None else item.prunable
        for item in found
    ]
    prunable = torch.cat(everywhere)
    none = torch.zeros(0, dtype=torch.long)
    return _Row(
        length=int(valid.sum()),
        words=words.nonzero()[:, 0],
        visual=join([places for places, _ in placed], none),
        grid=torch.cat(grids)[prunable],
        tile=join([item.grid[:, 1] if item.tile is None else item.tile for item in found], none),
        source=join([_widen(item.source, units) for item in found], none.new_zeros(0, units)),
        share=join([_share(item, units) for item in found], torch.zeros(0, units)),
        blended=any(item.share is not None for item in found),
        work=work,
    )


def _widen(table: Tensor, units: int) -> Tensor:
    return pad(table, (0, units - table.shape[1]))


def _share(item: Item, units: int) -> Tensor:
    """Return the weights of an item's units; one unit each has weight 1."""
    share = torch.ones(item.source.shape) if item.share is None else item.share.float()
    return _widen(share, units)
