"""What a calibration leaves behind: a pair of files that belongs to one revision of one model.

`<model>_<part>.safetensors` holds one tensor and `.json` beside it what it was made from. harness/calibrate.py makes
them; those of the models in this repository lie beside the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from harness.errors import UserError

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


@dataclass(frozen=True)
class Artifact:
    """One tensor that was calibrated on one model, present or not.

    Attributes:
        model: the model.
        part: what of the model's calibrations it is, in the name of the file.
        tensor: name of the tensor in the file.
        noun: what error lines call it.
        place: where in the model it belongs, for the line that says it is missing.
        options: what the command that makes it needs beside method and model.
        identity: what the description must say beside the model and its revision.
    """

    model: ModelSpec
    part: str
    tensor: str
    noun: str
    place: str = ""
    options: tuple[str, ...] = ()
    identity: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> Path:
        """Return where the tensor is kept."""
        suffix = "" if self.model.weights == "trained" else f"-{self.model.weights}"
        folder = SHIPPED if is_shipped(self.model) else LOCAL
        return folder / f"{self.model.name}{suffix}_{self.part}.safetensors"

    def describe(
        self, method: str | None = None, digests: Digests | None = None
    ) -> Mapping[str, Any]:
        """Return the description of files that are there and belong to these very weights; no tensor is read.

        Args:
            method: registry name of the method that asks, for the command in the error line.
            digests: file hashes known already, so that weights are not read twice.

        Raises:
            UserError: a file is missing, edited or made with other weights; the line prints the command.
        """
        described_in = self.path.with_suffix(".json")
        if not self.path.is_file() or not described_in.is_file():
            raise UserError(
                f"model={self.model.name!r} has no {self.noun}{self.place}; run: {self._command(method)}"
            )
        try:
            described = json.loads(described_in.read_text())
            key = described.pop("key")
        except (ValueError, KeyError, AttributeError) as error:
            raise self.broken("has no readable .json file beside it", method) from error
        if key != _key(described):
            raise self.broken("has an edited .json file beside it", method)
        wanted = self._identity(digests)
        if any(described.get(name) != value for name, value in wanted.items()):
            raise self.broken("was made with other weights", method)
        return {**described, "key": key}

    def read(self, method: str | None = None, digests: Digests | None = None) -> Tensor:
        """Return the tensor, on the CPU; arguments and errors as in `describe`."""
        described = self.describe(method, digests)
        try:
            with safe_open(self.path, framework="pt") as stream:
                found: Tensor = stream.get_tensor(self.tensor)
                key = (stream.metadata() or {}).get("key")
        except (SafetensorError, OSError) as error:
            raise self.broken(f"does not open ({error})", method) from error
        if key != described["key"]:
            raise self.broken("does not belong to the .json file beside it", method)
        return found

    def save(self, tensor: Tensor, made_from: Mapping[str, Any]) -> Path:
        """Store the tensor with its description and return its path. Each file appears whole or not at all.

        Args:
            tensor: what was calibrated.
            made_from: what else identifies it: prompt, number and hash of the images.
        """
        described = {**self._identity(None), "dtype": self.model.dtype, **made_from}
        described["key"] = _key(described)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {self.tensor: tensor.contiguous().cpu()}
        _write(self.path, save(tensors, metadata={"key": described["key"]}))
        _write(self.path.with_suffix(".json"), (json.dumps(described, indent=2) + "\n").encode())
        return self.path

    def broken(self, problem: str, method: str | None = None) -> UserError:
        """Return the error for files that are there and of no use."""
        return UserError(f"{self.noun} {self.path.name} {problem}; run: {self._command(method)}")

    def _identity(self, digests: Digests | None) -> dict[str, Any]:
        # Imported late: the engine uses this package too, and has nothing to do with specs and keys.
        from harness.running.keys import Digests, model_revision

        revision = model_revision(self.model, digests or Digests())
        return {"model": self.model.name, "revision": revision, **dict(self.identity)}

    def _command(self, method: str | None) -> str:
        model = self.model
        parts = ["python -m harness.calibrate"]
        parts += [] if method is None else [f"method={method}"]
        parts += [f"model={model.name}", *self.options]
        parts += [] if model.weights == "trained" else [f"model.weights={model.weights}"]
        if not is_shipped(model):
            parts += [] if model.path is None else [f"model.path={model.path}"]
            parts += ["images_dir=<folder of images>"]
        return " ".join(parts)


def _key(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
