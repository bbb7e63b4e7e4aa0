"""Installed packages, the machine's resources, and the folders for reading and writing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import requires
from itertools import product
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Literal

import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.errors import UserError
from espalier.harness.kinds.checkpoint_check import check_precision
from espalier.harness.models.checkpoint_files import check_checkpoint
from espalier.harness.paths import ROOT
from espalier.harness.runs.environment import device_name, installed_version
from espalier.harness.specs.hub_cache import file_of_hub
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
    wrong = []
    for need in wanted:
        present = installed_version(need.name)
        if present is None or not need.specifier.contains(present, prereleases=True):
            wrong.append(f"{need.name}{need.specifier} ({present or 'missing'})")
    assert not wrong, ", ".join(wrong)
    named = ("torch", "transformers", "lmms-eval")
    versions = (f"{name} {installed_version(name)}" for name in named)
    return f"Python {platform.python_version()}, {', '.join(versions)}"


def processor() -> str:
    """Report which cores this process may use and how much memory is free."""
    cores = len(os.sched_getaffinity(0))
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
    sections = {name: read_choice("model", name) for name in choices("model")}
    names = [
        name
        for name, section in sections.items()
        if section["hub"] and file_of_hub(section["hub"], "config.json", section["revision"])
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
