"""Positional priors of a model: a calibration for each layer that some method reads, and its resizing to other grids.

An image has one view or several, and each has its own map: the global view (0), then the stitched crops (1) or, where a
model does not stitch them, tile by tile (1, 2, ...). Frames of a video are global views.

The file of a model with one view holds that map (h, w). With several views (format 2) it holds their maps
concatenated, flat, and `grids` in the description gives their shapes. Files of earlier versions for such models, one
map averaged over all views of an image, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.harness.engine.artifacts import Artifact
from espalier.harness.errors import UserError
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method, MethodError
from espalier.methods.select.tiles import Tiles

#: (h, w) map of each view, the global view's first.
Prior = tuple[Tensor, ...]


#: Format of an artifact with several views; one with a single view has no format entry.
FORMAT = 2


def prior_artifact(model: ModelSpec, layer: int, store: Path | None = None) -> Artifact:
    """Return the prior of decoder layer `layer` of a model, present or not; `store` is searched first."""
    return Artifact(
        model,
        part=f"layer{layer}",
        tensor="prior",
        noun="positional prior",
        place=f" for decoder layer {layer}",
        options=(f"layer={layer}",),
        identity=(("layer", layer),),
        store=store,
    )


def prior_layers(method: Method, depth: int) -> tuple[int, ...]:
    """Return the decoder layers for which the method needs a prior on a model of `depth` layers, ascending."""
    layers = {
        site.layer - 1 if need.layer is None else need.layer
        for site in method.sites(depth)
        for need in method.needs(site)
        if need.signal == "prior"
    }
    return tuple(sorted(layers))


def require_prior(
    model: ModelSpec,
    method: Method,
    name: str,
    digests: Digests | None = None,
    store: Path | None = None,
) -> tuple[Path, ...]:
    """Return the artifacts that the method reads on this model; nothing is loaded.

    Args:
        model: the model.
        method: the built method.
        name: the method's registry name, for the command in the error line.
        digests: file hashes already known, so that weights are not read twice.
        store: searched first for the artifacts.

    Raises:
        UserError: an artifact is missing, belongs to other weights or mixes an image's views; the line prints the
            command that makes it.
    """
    layers = prior_layers(method, model.facts.text.layers)
    artifacts = [prior_artifact(model, layer, store) for layer in layers]
    for artifact in artifacts:
        _describe(artifact, name, digests)
    return tuple(artifact.path for artifact in artifacts)


def _describe(artifact: Artifact, name: str | None, digests: Digests | None) -> Mapping[str, Any]:
    """Return the description of an artifact of a supported format."""
    described = artifact.describe(name, digests)
    if "grids" not in described and described.get("maps") != described.get("images"):
        raise artifact.broken("has one map for all views of an image", name)
    if described.get("format", FORMAT) != FORMAT:
        raise artifact.broken(f"has the unknown format {described['format']}", name)
    return described


def prior_for(model: ModelSpec, method: Method, store: Path | None = None) -> Prior | None:
    """Return the prior that the method needs on this model, the store's first, or None if it needs none.

    Raises:
        UserError: the artifact is missing, stale or damaged, or the method needs the priors of several layers.
    """
    layers = prior_layers(method, model.facts.text.layers)
    if len(layers) > 1:
        raise UserError(f"method needs the priors of layers {layers}; valid: one layer")
    return load_prior(model, layers[0], store) if layers else None


def load_prior(model: ModelSpec, layer: int, store: Path | None = None) -> Prior:
    """Return the calibrated prior of one decoder layer, fp32 on the CPU.

    Raises:
        UserError: the artifact is missing, stale or damaged.
    """
    artifact, digests = prior_artifact(model, layer, store), Digests()
    described = _describe(artifact, None, digests)
    stored = artifact.read(digests=digests).float()
    grids = described["grids"] if "grids" in described else [described["grid"]]
    sizes = [height * width for height, width in grids]
    sound = (torch.isfinite(stored) & (stored >= 0)).all()
    if stored.numel() != sum(sizes) or not bool(sound):
        raise artifact.broken("does not hold attention values on its grids")
    maps = zip(stored.flatten().split(sizes), grids, strict=True)
    return tuple(values.view(*grid) for values, grid in maps)


def save_prior(
    model: ModelSpec,
    layer: int,
    prior: Prior,
    made_from: Mapping[str, Any],
    store: Path | None = None,
) -> Path:
    """Store a prior with its description and return its path. Each file is written atomically.

    Args:
        model: the model.
        layer: the decoder layer with the averaged attention.
        prior: mean attention of each view.
        made_from: further identity: prompt, number and hash of the images.
        store: the run store to write to.
    """
    grids = [list(view_map.shape) for view_map in prior]
    artifact = prior_artifact(model, layer, store)
    if len(prior) == 1:
        return artifact.save(prior[0].float(), {"grid": grids[0], **made_from})
    flat = torch.cat([view_map.float().flatten() for view_map in prior])
    return artifact.save(flat, {"format": FORMAT, "grids": grids, **made_from})


def resize_prior(prior: Prior, grid: Tensor) -> Tensor:
    """Return the prior of each token: its view's map, resized bilinearly (align_corners=False) to the view's grid.

    Args:
        prior: mean attention of each view; every image and frame gets its own copy. Tiles beyond the last known one use
            the last one's map.
        grid: (B, N, 4) image, view, row and column of ALL visual tokens of each row, so that the largest coordinates
            of a view are its size.

    Returns:
        (B, N) in fp32. Cost: O(V B N) for V views, no loop over tokens.

    Raises:
        MethodError: there are crops, and the prior covers the global view only. Only that check synchronises with the
            device.
    """
    view = grid[..., 1]
    if len(prior) == 1 and bool((view > 0).any()):
        raise MethodError(
            "this image has crops, and the positional prior was calibrated on images without any; "
            "valid: a prior from images like this one (python -m espalier calibrate)"
        )
    tiles = Tiles.of(grid)
    sizes = (tiles.of_token(tiles.height), tiles.of_token(tiles.width))
    resized = _resize(prior[0], grid, sizes)
    for number, values in enumerate(prior[1:], 1):
        resized = torch.where(view >= number, _resize(values, grid, sizes), resized)
    return resized


def _resize(values: Tensor, grid: Tensor, sizes: tuple[Tensor, Tensor]) -> Tensor:
    """Return a map (h, w) at the position of each token of grid (B, N, 4), in views of `sizes`, (B, N) each."""
    (top_row, bottom_row, row_weight), (left_column, right_column, column_weight) = (
        _neighbours(grid[..., 2 + axis], sizes[axis], values.shape[axis]) for axis in (0, 1)
    )
    values = values.float()
    upper_values = torch.lerp(
        values[top_row, left_column], values[top_row, right_column], column_weight
    )
    lower_values = torch.lerp(
        values[bottom_row, left_column], values[bottom_row, right_column], column_weight
    )
    return torch.lerp(upper_values, lower_values, row_weight)


def _neighbours(place: Tensor, length: Tensor, source: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source indices around each position of an axis and the weight of the second."""
    position = ((place + 0.5) * (source / length.clamp(min=1)) - 0.5).clamp(0, source - 1)
    low = position.floor().long()
    return low, (low + 1).clamp(max=source - 1), position - low
