"""Measuring the positional prior: the mean attention maps of some decoder layers over many images, view by view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from espalier.harness.cost.budget import Budget
from espalier.harness.engine.priors import Prior
from espalier.harness.errors import UserError
from espalier.harness.tools.calibration.calibration_images import ImageDigest, question
from espalier.methods.base import MethodError, Need, Plan, Site, TokenReducer, View

if TYPE_CHECKING:
    from PIL.Image import Image

    from espalier.harness.models.adapter import Adapter


@dataclass(frozen=True)
class Recorder(TokenReducer):
    """Drops nothing and hands on the last prompt token's attention in some layers.

    Attributes:
        layers: decoder layers to record.
        collect: called with (layer, grid (B, N, 4), attention (B, N)).
    """

    layers: tuple[int, ...]
    collect: Callable[[int, Tensor, Tensor], None]

    def sites(self, depth: int) -> tuple[Site, ...]:
        """Return the site after each layer."""
        outside = [layer for layer in self.layers if not 0 <= layer < depth - 1]
        if outside:
            raise MethodError(f"layer={outside[0]} is out of range; valid: 0 to {depth - 2}")
        return tuple(Site("layer", layer + 1) for layer in self.layers)

    def needs(self, site: Site) -> tuple[Need, ...]:
        """Return the attention of the layer before the site."""
        return (Need("last_attention"),)

    def plan(self, view: View, keep: int) -> Plan:
        """Record and keep everything."""
        self.collect(view.site.layer - 1, view.grid, view.signals["last_attention"])
        n_rows, n_tokens = view.grid.shape[:2]
        return Plan(torch.arange(n_tokens, device=view.grid.device).expand(n_rows, n_tokens))


@dataclass
class MapMean:
    """Running mean of one view's attention maps in double precision; other grids are resized to the first one's.

    Attributes:
        total: (h, w) sum of the maps, None before the first one.
        n_maps: how many.
        level: sum over the maps of the mean attention that a place of the same image's global view was paid.
    """

    total: Tensor | None = None
    n_maps: int = 0
    level: float = 0.0

    def add(self, places: Tensor, values: Tensor, level: float) -> None:
        """Add one map: rows and columns (n, 2) and attention (n,) of its places."""
        row, column = places.unbind(dim=1)
        attention_map = values.new_zeros(int(row.max()) + 1, int(column.max()) + 1)
        attention_map[row, column] = values
        if self.total is None:
            self.total = torch.zeros_like(attention_map)
        if attention_map.shape != self.total.shape:
            size = tuple(self.total.shape)
            attention_map = interpolate(
                attention_map[None, None], size=size, mode="bilinear", align_corners=False
            )[0, 0]
        self.total += attention_map
        self.n_maps += 1
        self.level += level


@dataclass
class ViewMeans:
    """Running means by view: the global view (0), and the stitched crops (1) or each tile where a model has them."""

    views: dict[int, MapMean] = field(default_factory=dict)

    def add(self, grid: Tensor, attention: Tensor) -> None:
        """Add every view of every image of grid (B, N, 4) and attention (B, N)."""
        for row_grid, row_values in zip(grid.cpu(), attention.double().cpu(), strict=True):
            for image in row_grid[:, 0].unique():
                is_here = row_grid[:, 0] == image
                places, values = row_grid[is_here, 1:], row_values[is_here]
                level = float(values[places[:, 0] == 0].mean())
                for view in places[:, 0].unique().tolist():
                    inside = places[:, 0] == view
                    mean = self.views.setdefault(view, MapMean())
                    mean.add(places[inside, 1:], values[inside], level)

    @property
    def n_maps(self) -> int | list[int]:
        """How many maps each view's mean was made of; one number if there is one view."""
        counts = [self.views[view].n_maps for view in sorted(self.views)]
        return counts[0] if len(counts) == 1 else counts

    def prior(self) -> Prior:
        """Return the mean map of each view.

        Not every image has every tile, and images of more tokens pay less to each of them. So the mean of a view that
        some images lack is scaled by what the global view is paid in all images over what it is paid in these: the
        ratio between two places is then the same as in images that have both. Views that all images have are plain
        means, as printed.

        Raises:
            UserError: there were no images.
        """
        if not self.views:
            raise UserError("images: no image gave any visual token")
        usual = self.views[0].level / self.views[0].n_maps
        maps = []
        for view in sorted(self.views):
            mean = self.views[view]
            assert mean.total is not None  # made with the first map
            maps.append(mean.total / mean.n_maps * (usual / (mean.level / mean.n_maps)))
        return tuple(maps)


@dataclass
class Calibration(ImageDigest):
    """Means by layer, and their sources."""

    means: dict[int, ViewMeans] = field(default_factory=dict)


def calibrate(
    adapter: Adapter,
    layers: Sequence[int],
    images: Iterable[Image],
    prompt: str,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda _: None,
) -> Calibration:
    """Return the mean attention maps of some decoder layers over images.

    Args:
        adapter: a loaded model.
        layers: decoder layers, 0-based.
        images: RGB images.
        prompt: the same text for every image, put into the model's chat template.
        batch_size: images in one pass.
        advance: called with the number of images done after each pass.

    Raises:
        MethodError: the model has no such layer.
    """
    # The engine brings in transformers, seconds that a refused command line need not pay.
    from espalier.harness.engine.session import Session

    calibration = Calibration(means={layer: ViewMeans() for layer in layers})
    recorder = Recorder(
        tuple(layers), lambda layer, grid, rows: calibration.means[layer].add(grid, rows)
    )
    with Session(adapter, recorder, Budget(rule="kept", ratio=0.0)) as session:
        waiting = iter(images)
        for batch in iter(lambda: list(islice(waiting, batch_size)), []):
            chats = [question(image, prompt) for image in batch]
            names = [str(calibration.n_images + number) for number in range(len(batch))]
            session.generate(adapter.encode(chats), names, max_new_tokens=1, do_sample=False)
            for image in batch:
                calibration.see(image)
            advance(len(batch))
    return calibration
