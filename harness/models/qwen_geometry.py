"""Where the units of Qwen's projector stand: a square of patches each, in raster order or window by window."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from espalier.harness.cost.row_work import Work
from espalier.harness.engine.visual_items import Item, rectangle


def merged_item(
    shape: Sequence[int], side: int, first: int, order: Tensor, window_pairs: int
) -> Item:
    """Describe an image or video.

    Args:
        shape: frames, rows and columns of patches.
        side: patches along the edge of a merged square.
        first: number of its first projector unit.
        order: (units,) raster number of each unit, in the projector's order.
        window_pairs: pairs of patches attended in a windowed layer, 0 without windows.
    """
    frames, rows, columns = shape
    work = Work(
        tokens=frames * rows * columns,
        pairs=frames * (rows * columns) ** 2,
        window_pairs=window_pairs,
        units=len(order),
    )
    # The k-th unit holds raster token order[k]; the inverse says which unit each token is.
    source = first + order.argsort().unsqueeze(1)
    return Item(rectangle(frames, rows // side, columns // side), source, work=work)


def window_order(shape: Sequence[int], merge: int, side: int) -> tuple[Tensor, int]:
    """Return the units window by window, raster order in each, and the pairs of patches attended in windows.

    Args:
        shape: frames, rows and columns of patches.
        merge: patches along the edge of a unit.
        side: units along the edge of a window; windows are cut off at the image's border.
    """
    frames, rows, columns = shape[0], shape[1] // merge, shape[2] // merge
    frame, _, row, column = rectangle(frames, rows, columns).unbind(1)
    windows_x, windows_y = -(-columns // side), -(-rows // side)
    window = (frame * windows_y + row // side) * windows_x + column // side
    patches = window.bincount() * merge**2
    return window.argsort(stable=True), int(patches.square().sum())
