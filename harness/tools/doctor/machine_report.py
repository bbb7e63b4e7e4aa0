"""Installed packages, the machine's resources, and the folders for reading and writing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import product
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Literal

import torch
import yaml
from huggingface_hub import constants, try_to_load_from_cache
from packaging.requirements import Requirement

from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import check_precision
from espalier.harness.models.checkpoint_files import check_checkpoint
from espalier.harness.paths import CONF, ROOT
from espalier.harness.runs.environment import device_name
from espalier.harness.specs.run_spec import ATTENTIONS, DTYPES
from espalier.harness.store import Store
from espalier.harness.store.files.digests import Digests

Status = Literal["ok", "failed", "not here"]

#: Checks one thing and returns the result in a few words; raises NotHere, or the fault.
Check = Callable[[], str]

#: How a check fails: its own comparison, our refusals, and what drivers, files and missing packages raise.
FAULTS = (AssertionError, UserError, RuntimeError, OSError, ImportError, ValueError)


class NotHere(Exception):
    """This machine lacks the subject of the check."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, in words, and how long it took in seconds."""

    name: str
    status: Status
    detail: str
    seconds: float


def examine(name: str, check: Check) -> Finding:
    """Run one check and report its result."""
    started = perf_counter()
    status: Status = "ok"
    try:
        detail = check()
    except NotHere as reason:
        status, detail = "not here", str(reason)
    except FAULTS as fault:
        status, detail = "failed", f"{type(fault).__name__}: {' '.join(str(fault).split())}"
    return Finding(name, status, detail, perf_counter() - started)


GIB = 2**30
SEEDLING = ROOT / "harness" / "seedling" / "weights"


def packages() -> str:
    """Hold the installed versions against requirements.txt, or those that the installed package needs for a run.

    Raises:
        AssertionError: one is missing or outside its range.
    """
    file = ROOT / "requirements.txt"
    if file.is_file():
        lines = file.read_text(encoding="utf-8").splitlines()
        wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    else:
        needs = [Requirement(line) for line in requires("espalier-vlm") or ()]
        wanted = [
            need for need in needs if not need.marker or need.marker.evaluate({"extra": "run"})
        ]
    wrong = [
        f"{requirement.name}{requirement.specifier} ({_installed(requirement.name) or 'missing'})"
        for requirement in wanted
        if _unmet(requirement)
    ]
    assert not wrong, ", ".join(wrong)
    named = ("torch", "transformers", "lmms-eval")
    return f"Python {platform.python_version()}, " + ", ".join(
        f"{n} {_installed(n)}" for n in named
    )


def _unmet(requirement: Requirement) -> bool:
    version = _installed(requirement.name)
    return version is None or not requirement.specifier.contains(version, prereleases=True)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Report which cores this process may use and how much memory is free."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return f"{device_name('cpu')}, {cores} cores, {torch.get_num_threads()} threads, {free:.1f} GiB free"


def gpus() -> str:
    """Report which GPUs torch sees, the free memory of each, and whether it computes in bfloat16."""
    if not torch.cuda.is_available():
        raise NotHere("torch sees no CUDA device")
    names = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        names.append(
            f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        )
    half = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
    return f"{'; '.join(names)}; CUDA {torch.version.cuda}, {half}"


def precision() -> str:
    """Report the precisions and attentions that no model can have on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    refused = []
    for dtype, attention in product(DTYPES, ATTENTIONS):
        model = {"device": device, "device_map": None, "dtype": dtype, "attention": attention}
        try:
            check_precision(SimpleNamespace(**model))
        except UserError as error:
            refused.append(str(error).partition("; valid")[0])
    return "; ".join(dict.fromkeys(refused)) or f"{', '.join(DTYPES)} on {device}"


def store(root: Path) -> str:
    """Write, flush and remove a file where rows go."""
    Store(root).check_writable()
    free = shutil.disk_usage(root).free / GIB
    assert free > 1, f"{free:.2f} GiB are free at {root}"
    return f"{root} can be written, {free:.0f} GiB free"


def checkpoints() -> str:
    """Report which published checkpoints of conf/model are in the local Hugging Face cache."""
    hubs = {
        path.stem: (cfg.get("hub"), cfg.get("revision"))
        for path in sorted(CONF.glob("model/*.yaml"))
        if (cfg := yaml.safe_load(path.read_text(encoding="utf-8")))
    }
    names = [
        name
        for name, (hub, revision) in hubs.items()
        if hub and isinstance(try_to_load_from_cache(hub, "config.json", revision=revision), str)
    ]
    if not names:
        raise NotHere(
            f"no published checkpoint in {constants.HF_HUB_CACHE}; the embedded models need none"
        )
    return f"{', '.join(names)} in {constants.HF_HUB_CACHE}"


def embedded() -> str:
    """Check the embedded models' weight files against their checksums."""
    folders = sorted(path.parent for path in SEEDLING.glob("*/config.json"))
    for folder in folders:
        check_checkpoint(folder, Digests())
    assert folders, f"{SEEDLING} holds no model"
    return ", ".join(folder.name for folder in folders)
