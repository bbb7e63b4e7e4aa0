"""FitPrune's scheme of a model: stored once, and set in the method when a run is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from espalier.harness.engine.artifacts.calibration_files import Artifact
from espalier.methods.base import MethodError, TokenReducer
from espalier.methods.fitprune import FitPrune

if TYPE_CHECKING:
    from espalier.harness.specs.run_spec import ModelSpec
    from espalier.harness.store.files.digests import Digests

Scheme = tuple[tuple[float, ...], ...]


def scheme_artifact(model: ModelSpec, store: Path | None = None) -> Artifact:
    """Return the scheme of a model, present or not; `store` is searched first."""
    return Artifact(model, part="fitprune", tensor="scheme", noun="fitted scheme", store=store)


def with_scheme(
    model: ModelSpec,
    method: TokenReducer,
    name: str,
    digests: Digests | None = None,
    store: Path | None = None,
) -> TokenReducer:
    """Return FitPrune with the model's scheme if it has none yet, and any other method unchanged.

    From then on the scheme is an ordinary hyper-parameter, part of the run key and of the row.

    Args:
        model: the model; it is not loaded.
        method: the built method.
        name: its registry name, for the command in the error line.
        digests: file hashes already known, so that weights are not read twice.
        store: searched first for the scheme.

    Raises:
        UserError: the scheme is missing, damaged or of other weights; the line prints the command that makes it.
    """
    if not isinstance(method, FitPrune) or method.scheme:
        return method
    artifact = scheme_artifact(model, store)
    rows = artifact.read(name, digests).tolist()
    try:
        filled = replace(method, scheme=tuple(map(tuple, rows)))
        filled.sites(model.facts.text.layers)
    except (MethodError, TypeError) as error:
        raise artifact.broken("holds no scheme for this model", name) from error
    return filled


def save_scheme(
    model: ModelSpec, scheme: Scheme, made_from: Mapping[str, Any], store: Path | None = None
) -> Path:
    """Store a scheme with its description and return its path; see `Artifact.save`."""
    description = {"alphas": len(scheme), **made_from}
    return scheme_artifact(model, store).save(
        torch.tensor(scheme, dtype=torch.float64), description
    )
