"""Results of calibrations: pairs of files that belong to one revision of one model. FitPrune's scheme is such a pair.

`<model>_<part>.safetensors` holds one tensor and `<model>_<part>.json` its origin. harness/tools/calibration writes
them to `<store>/calibration`, which is searched first. Those of the models in this repository are next to the weights;
they are only read, never written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from espalier.harness.errors import FOREIGN, UserError, first_words
from espalier.harness.paths import DEFAULT_STORE, located
from espalier.harness.specs.revisions import model_revision
from espalier.harness.specs.run_spec import ModelSpec
from espalier.harness.store.files import durable
from espalier.harness.store.files.digests import Digests, read_json
from espalier.harness.store.files.folder_checks import below
from espalier.methods.base import MethodError, TokenReducer
from espalier.methods.fitprune import FitPrune

HARNESS = Path(__file__).resolve().parents[1]
SHIPPED = HARNESS / "seedling" / "calibration"
#: Errors that a damaged file of tensors raises.
BROKEN: tuple[type[Exception], ...] = (*FOREIGN, SafetensorError)

Scheme = tuple[tuple[float, ...], ...]


def is_shipped(model: ModelSpec) -> bool:
    """Return whether the model's weights are in this repository: then its artifacts are too, made from scenes."""
    inside = model.path is not None and model.path.resolve().is_relative_to(HARNESS)
    return inside and model.weights == "trained"


@dataclass(frozen=True)
class Artifact:
    """One tensor that was calibrated on one model, present or not.

    Attributes:
        model: the model.
        part: kind of calibration, in the name of the file.
        tensor: name of the tensor in the file.
        noun: name in error lines.
        place: location in the model, for the error line of a missing file.
        options: options of the command that makes it, in addition to method and model.
        identity: entries that the description must have, in addition to the model and its revision.
        store: the run store that calibrations are written to and searched in first; None: the default one.
    """

    model: ModelSpec
    part: str
    tensor: str
    noun: str
    place: str = ""
    options: tuple[str, ...] = ()
    identity: tuple[tuple[str, Any], ...] = ()
    store: Path | None = None

    @property
    def path(self) -> Path:
        """Return the path of the tensor: in the store, else where it was shipped.

        A file in the store made with other weights yields to the file shipped for these.
        """
        return self._existing_path(None)

    def _existing_path(self, digests: Digests | None) -> Path:
        places = self._paths()
        existing = [place for place in places if place.is_file()]
        if len(existing) > 1 and not self._belongs(existing[0], digests):
            return existing[1]
        return next(iter(existing), places[0])

    def _paths(self) -> list[Path]:
        suffix = "" if self.model.weights == "trained" else f"-{self.model.weights}"
        name = f"{self.model.name}{suffix}_{self.part}.safetensors"
        shipped = [SHIPPED / name] if is_shipped(self.model) else []
        return [(self.store or DEFAULT_STORE) / "calibration" / name, *shipped]

    def _belongs(self, place: Path, digests: Digests | None) -> bool:
        """Return whether the description of a file is complete and names exactly these weights."""
        try:
            described = read_json(place.with_suffix(".json"))
            wanted = self._identity(digests)
            return all(described.get(name) == value for name, value in wanted.items())
        except FOREIGN:
            return False

    def describe(
        self, method: str | None = None, digests: Digests | None = None
    ) -> Mapping[str, Any]:
        """Return the description of existing files that belong to exactly these weights; no tensor is read.

        Args:
            method: registry name of the method, for the command in the error line.
            digests: file hashes already known, so that weights are not read twice.

        Raises:
            UserError: a file is missing, edited or made with other weights; the line prints the command.
        """
        path = self._existing_path(digests)
        described_in = path.with_suffix(".json")
        if not path.is_file() or not described_in.is_file():
            raise UserError(
                f"model={self.model.name!r} has no {self.noun}{self.place}; run: {self._command(method)}"
            )
        try:
            described = read_json(described_in)
            key = described.pop("key")
        except FOREIGN as error:
            raise self.broken("has no readable .json file beside it", method) from error
        if key != _key(described):
            raise self.broken("has an edited .json file beside it", method)
        if any(described.get(name) != value for name, value in self._identity(digests).items()):
            raise self.broken("was made with other weights", method)
        return {**described, "key": key}

    def read(self, method: str | None = None, digests: Digests | None = None) -> Tensor:
        """Return the tensor, on the CPU; arguments and errors as in `describe`."""
        described = self.describe(method, digests)
        try:
            with safe_open(self._existing_path(digests), framework="pt") as stream:
                tensor_read: Tensor = stream.get_tensor(self.tensor)
                key = (stream.metadata() or {}).get("key")
        except BROKEN as error:
            raise self.broken(f"does not open ({first_words(error)})", method) from error
        if key != described["key"]:
            raise self.broken("does not belong to the .json file beside it", method)
        return tensor_read

    def save(self, tensor: Tensor, made_from: Mapping[str, Any]) -> Path:
        """Write the tensor with its description to the store and return its path. Each file is written atomically.

        Args:
            tensor: the calibrated values.
            made_from: further identity: prompt, number and hash of the images.

        Raises:
            StoreLost: the disk is full or cannot be written.
            UserError: the folder of calibrations is a link.
        """
        described = {**self._identity(None), "dtype": self.model.dtype, **made_from}
        described["key"] = _key(described)
        path = self._paths()[0]
        below(path.parents[1], path.parent.name).mkdir(parents=True, exist_ok=True)
        tensors = {self.tensor: tensor.contiguous().cpu()}
        durable.replace(path, save(tensors, metadata={"key": described["key"]}))
        durable.replace(path.with_suffix(".json"), f"{json.dumps(described, indent=2)}\n".encode())
        return path

    def broken(self, problem: str, method: str | None = None) -> UserError:
        """Return the error for files that exist but cannot be used."""
        return UserError(f"{self.noun} {self.path.name} {problem}; run: {self._command(method)}")

    def _identity(self, digests: Digests | None) -> dict[str, Any]:
        revision = model_revision(self.model, digests or Digests())
        return {"model": self.model.name, "revision": revision, **dict(self.identity)}

    def _command(self, method: str | None) -> str:
        model = self.model
        parts = ["python -m espalier calibrate"]
        parts += [] if method is None else [f"method={method}"]
        parts += [f"model={model.name}", *self.options]
        parts += [] if model.weights == "trained" else [f"model.weights={model.weights}"]
        if self.store not in (None, located(DEFAULT_STORE)):
            parts += [f"store={self.store}"]
        if not is_shipped(model):
            parts += [] if model.path is None else [f"model.path={model.path}"]
            parts += ["images_dir=<folder of images>"]
        return " ".join(parts)


def _key(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


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
