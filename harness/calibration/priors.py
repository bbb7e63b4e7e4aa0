"""The positional prior of a model: one artifact for each layer that some method reads, and its shape on other grids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.calibration.artifacts import Artifact
from harness.errors import UserError
from methods.base import Method
from methods.select.tiles import Tiles

if TYPE_CHECKING:
    from harness.config.spec import ModelSpec
    from harness.running.keys import Digests


def prior_artifact(model: ModelSpec, layer: int) -> Artifact:
    """Return the prior of decoder layer `layer` of a model, present or not."""
    return Artifact(
        model,
        part=f"layer{layer}",
        tensor="prior",
        noun="positional prior",
        place=f" for decoder layer {layer}",
        options=(f"layer={layer}",),
        identity=(("layer", layer),),
    )


def artifact_path(model: ModelSpec, layer: int) -> Path:
    """Return where the prior of decoder layer `layer` of a model is kept, present or not."""
    return prior_artifact(model, layer).path


def prior_layers(method: Method, depth: int) -> tuple[int, ...]:
    """Return the decoder layers whose prior the method needs on a model of `depth` layers, ascending."""
    found = {
        site.layer - 1 if need.layer is None else need.layer
        for site in method.sites(depth)
        for need in method.needs(site)
        if need.signal == "prior"
    }
    return tuple(sorted(found))


def require_prior(
    model: ModelSpec, method: Method, name: str, digests: Digests | None = None
) -> tuple[Path, ...]:
    """Return the artifacts that the method reads on this model; nothing is loaded.

    Args:
        model: the model.
        method: the built method.
        name: the method's registry name, for the command in the error line.
        digests: file hashes known already, so that weights are not read twice.

    Raises:
        UserError: an artifact is missing or belongs to other weights; the line prints the command that makes it.
    """
    layers = prior_layers(method, model.facts.text.layers)
    artifacts = [prior_artifact(model, layer) for layer in layers]
    for artifact in artifacts:
        artifact.describe(name, digests)
    return tuple(artifact.path for artifact in artifacts)


def prior_for(model: ModelSpec, method: Method) -> Tensor | None:
    """Return the (h, w) prior that the method needs on this model, or None if it needs none.

    Raises:
        UserError: the artifact is missing, stale or damaged, or the method needs the priors of several layers.
    """
    layers = prior_layers(method, model.facts.text.layers)
    if len(layers) > 1:
        raise UserError(f"method needs the priors of layers {layers}; valid: one layer")
    return load_prior(model, layers[0]) if layers else None


def load_prior(model: ModelSpec, layer: int) -> Tensor:
    """Return the calibrated prior (h, w) of one decoder layer, fp32 on the CPU.

    Raises:
        UserError: the artifact is missing, stale or damaged.
    """
    artifact = prior_artifact(model, layer)
    prior = artifact.read().float()
    if prior.dim() != 2 or not bool((torch.isfinite(prior) & (prior >= 0)).all()):
        raise artifact.broken("is not a grid of attention values")
    return prior


def save_prior(model: ModelSpec, layer: int, prior: Tensor, made_from: Mapping[str, Any]) -> Path:
    """Store a prior (h, w) with its description and return its path. Each file appears whole or not at all.

    Args:
        model: the model.
        layer: the decoder layer whose attention was averaged.
        prior: (h, w) mean attention.
        made_from: what else identifies it: prompt, number and hash of the images.
    """
    made = {"grid": list(prior.shape), **made_from}
    return prior_artifact(model, layer).save(prior.float(), made)


def resize_prior(prior: Tensor, grid: Tensor) -> Tensor:
    """Return the prior of each token, resized bilinearly (align_corners=False) to the grid of the token's tile.

    Args:
        prior: (h, w) mean attention on the calibration grid; every image and tile gets its own copy.
        grid: (B, N, 4) image, tile, row and column of ALL visual tokens of each row, so that the largest coordinates
            of a tile are its size.

    Returns:
        (B, N) in fp32. Cost: O(B N), no Python loop.
    """
    tiles = Tiles.of(grid)
    sizes = (tiles.of_token(tiles.height), tiles.of_token(tiles.width))
    (top, bottom, down), (left, right, across) = (
        _between(grid[..., 2 + axis], sizes[axis], prior.shape[axis]) for axis in (0, 1)
    )
    prior = prior.float()
    upper = torch.lerp(prior[top, left], prior[top, right], across)
    lower = torch.lerp(prior[bottom, left], prior[bottom, right], across)
    return torch.lerp(upper, lower, down)


def _between(place: Tensor, length: Tensor, source: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source indices around each place of an axis and the weight of the second."""
    at = ((place + 0.5) * (source / length.clamp(min=1)) - 0.5).clamp(0, source - 1)
    low = at.floor().long()
    return low, (low + 1).clamp(max=source - 1), at - low
