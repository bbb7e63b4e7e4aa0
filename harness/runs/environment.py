"""The environment of a run: versions, device, attention back end, commit."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.harness.paths import ROOT
from espalier.harness.specs.hub_cache import cached_data
from espalier.harness.specs.run_spec import RunSpec
from espalier.version import __version__


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the environment block of a row. Cost: one call of git in a process's first row."""
    model, bench = spec.model, spec.benchmark
    name = bench.dataset.path if bench.path is None else None
    data = None if name is None else cached_data(name, bench.dataset.revision)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "lmms_eval": installed_version("lmms-eval"),
        "platform": f"{platform.system()} {platform.machine()}",
        "weights": model.weights,
        "layers": [model.facts.tower.layers, model.facts.text.layers],
        "device": model.device_map or model.device,
        "device_name": device_name(model.device),
        "dtype": model.dtype,
        "attention": model.attention,
        "backend": spec.engine.backend,
        "batch_size": spec.engine.batch_size,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        **({} if data is None else {"dataset": data}),
    }


def placement(model: nn.Module) -> dict[str, Any]:
    """Return the placement of a model's weights: GiB by device (`offloaded` for meta tensors), and names of cards.

    Quantised weights count as packed, with their scales.
    """
    # It brings scipy, half a second that the run key of a finished run need not wait for.
    from espalier.harness.cost.bounds import stored_tensors

    sizes: dict[str, int] = {}
    for tensor in stored_tensors(model):
        place = "offloaded" if tensor.is_meta else str(tensor.device)
        sizes[place] = sizes.get(place, 0) + tensor.numel() * tensor.element_size()
    cards = [torch.cuda.get_device_name(place) for place in sizes if place.startswith("cuda")]
    return {"weights_gib": {p: round(size / 2**30, 3) for p, size in sizes.items()}, "cards": cards}


def device_name(device: str) -> str:
    """Return the name of the GPU or of the processor."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else processor_name()


@cache
def processor_name() -> str:
    """Return the processor's name as Linux gives it, else the machine type."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@cache  # reading the metadata of a package takes milliseconds, and a sweep needs it for every cell
def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# A process keeps the code that it has loaded, whatever is checked out meanwhile.
@cache
def commit() -> str | None:
    """Return the abbreviated commit, with `-dirty` for local changes; of an installed package its version.

    None: git does not answer.
    """
    # An installed package may be inside a repository of the user.
    if not (ROOT / ".git").exists():
        return f"espalier-{__version__}"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
