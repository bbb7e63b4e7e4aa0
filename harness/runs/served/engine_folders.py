"""Folders that a child process of another environment reads: the code of the plug-in, and the model's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.specs.hub_cache import cached_file
from espalier.version import __version__

if TYPE_CHECKING:
    from espalier.harness.models.adapter import Adapter
    from espalier.harness.specs.run_spec import ModelSpec

#: What an installation would write, so that vLLM finds the plug-in in each of its processes.
ENTRY_POINTS = "[vllm.general_plugins]\nespalier = espalier.serve.plugin:register\n"

#: Files that hold the weights and their configuration; the rest is written from the run's settings.
WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "config.json",
    "generation_config.json",
)


def code_folder(place: Path) -> Path:
    """Make a folder for PYTHONPATH from which another interpreter imports this package, and nothing else."""
    place.mkdir()
    # In a repository the package is a folder of links beside harness/; in an installation it holds harness/ itself.
    package = ROOT / "espalier" if (ROOT / "espalier").is_dir() else ROOT
    (place / "espalier").symlink_to(package, target_is_directory=True)
    record = place / f"espalier_serve-{__version__}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: espalier-serve\nVersion: {__version__}\n", encoding="utf-8"
    )
    (record / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return place


def model_folder(place: Path, spec: ModelSpec, adapter: Adapter) -> Path:
    """Make a folder with the checkpoint's weights, as links, and the run's processor; random weights are none.

    Raises:
        UserError: the checkpoint is not on this machine.
    """
    place.mkdir()
    adapter.processor.save_pretrained(place)
    if spec.weights == "random":
        configuration = adapter.model.config
        configuration.architectures = [type(adapter.model).__name__]
        configuration.save_pretrained(place)
        return place
    config = cached_file(spec, "config.json") if spec.path is None else spec.path / "config.json"
    if config is None:
        raise UserError(
            f"model.hub={spec.hub!r} is not in the local Hugging Face cache; valid: model.path=<directory>"
        )
    for pattern in WEIGHTS:
        for file in config.parent.glob(pattern):
            os.symlink(file.resolve(), place / file.name)
    return place
