"""The positional prior of a model: where its artifact lies, how it is checked and read, its shape on other grids.

An artifact is a pair of files, `<model>_layer<l>.safetensors` with the (h, w) tensor and `.json` with what it was made
from. It belongs to one layer of one model revision; harness/calibrate.py makes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from harness.errors import UserError
from methods.base import Method
from methods.select.tiles import Tiles

if TYPE_CHECKING:
    from harness.config.spec import ModelSpec
    from harness.running.keys import Digests

HARNESS = Path(__file__).resolve().parents[1]
SHIPPED = HARNESS / "seedling" / "calibration"
LOCAL = HARNESS.parent / "results" / "calibration"


def is_shipped(model: ModelSpec) -> bool:
    """Say whether the model's weights lie in this repository: then its artifacts do too, and scenes calibrate it."""
    inside = model.path is not None and model.path.resolve().is_relative_to(HARNESS)
    return inside and model.weights == "trained"


def artifact_path(model: ModelSpec, layer: int) -> Path:
    """Return where the prior of decoder layer `layer` of a model is kept, present or not."""
    suffix = "" if model.weights == "trained" else f"-{model.weights}"
    folder = SHIPPED if is_shipped(model) else LOCAL
    return folder / f"{model.name}{suffix}_layer{layer}.safetensors"


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
    for layer in layers:
        _described(model, layer, name, digests)
    return tuple(artifact_path(model, layer) for layer in layers)


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
    described = _described(model, layer)
    path = artifact_path(model, layer)
    try:
        with safe_open(path, framework="pt") as stream:
            prior: Tensor = stream.get_tensor("prior").float()
            key = (stream.metadata() or {}).get("key")
    except (SafetensorError, OSError) as error:
        raise _broken(model, layer, f"does not open ({error})") from error
    if key != described["key"]:
        raise _broken(model, layer, "does not belong to the .json file beside it")
    if prior.dim() != 2 or not bool((torch.isfinite(prior) & (prior >= 0)).all()):
        raise _broken(model, layer, "is not a grid of attention values")
    return prior


def save_prior(model: ModelSpec, layer: int, prior: Tensor, made_from: Mapping[str, Any]) -> Path:
    """Store a prior (h, w) with its description and return its path. Each file appears whole or not at all.

    Args:
        model: the model.
        layer: the decoder layer whose attention was averaged.
        prior: (h, w) mean attention.
        made_from: what else identifies it: prompt, number and hash of the images.
    """
    path = artifact_path(model, layer)
    described = {
        **_identity(model, layer, None),
        "dtype": model.dtype,
        "grid": list(prior.shape),
        **made_from,
    }
    described["key"] = _key(described)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"prior": prior.float().contiguous().cpu()}
    _write(path, save(tensors, metadata={"key": described["key"]}))
    _write(path.with_suffix(".json"), (json.dumps(described, indent=2) + "\n").encode())
    return path


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


def _described(
    model: ModelSpec, layer: int, method: str | None = None, digests: Digests | None = None
) -> dict[str, Any]:
    """Return the description of an artifact that is there and belongs to these very weights."""
    path = artifact_path(model, layer)
    if not path.is_file() or not path.with_suffix(".json").is_file():
        raise UserError(
            f"model={model.name!r} has no positional prior for decoder layer {layer}; "
            f"run: {_command(model, layer, method)}"
        )
    try:
        described = json.loads(path.with_suffix(".json").read_text())
        key = described.pop("key")
    except (ValueError, KeyError, AttributeError) as error:
        raise _broken(model, layer, "has no readable .json file beside it", method) from error
    if key != _key(described):
        raise _broken(model, layer, "has an edited .json file beside it", method)
    if any(
        described.get(name) != value for name, value in _identity(model, layer, digests).items()
    ):
        raise _broken(model, layer, "was made with other weights", method)
    return {**described, "key": key}


def _identity(model: ModelSpec, layer: int, digests: Digests | None) -> dict[str, Any]:
    # Imported late: the engine uses this file too, and has nothing to do with specs and keys.
    from harness.running.keys import Digests, model_revision

    revision = model_revision(model, digests or Digests())
    return {"model": model.name, "revision": revision, "layer": layer}


def _key(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _broken(model: ModelSpec, layer: int, problem: str, method: str | None = None) -> UserError:
    path = artifact_path(model, layer)
    return UserError(
        f"positional prior {path.name} {problem}; run: {_command(model, layer, method)}"
    )


def _command(model: ModelSpec, layer: int, method: str | None) -> str:
    parts = ["python -m harness.calibrate"]
    parts += [] if method is None else [f"method={method}"]
    parts += [f"model={model.name}", f"layer={layer}"]
    parts += [] if model.weights == "trained" else [f"model.weights={model.weights}"]
    if not is_shipped(model):
        parts += [] if model.path is None else [f"model.path={model.path}"]
        parts += ["images_dir=<folder of images>"]
    return " ".join(parts)


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
