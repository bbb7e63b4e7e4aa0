"""Seeds of runs in which nothing is drawn are one run; every other seed is a run of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import espalier
from espalier.harness.runs.admission import admit
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Plan, Site, TokenReducer, View
from espalier.methods.compressor import CacheCompressor, CacheView
from espalier.methods.select.topk import top
from tests.commands import spec_of

SAMPLED = ("+benchmark.generation.do_sample=true", "+benchmark.generation.temperature=0.7")
OPEN = "model.closed_vocabulary=false"
DENOISED = ("model=seedling_diffusion", "benchmark=seedling_caption", "method=none")

#: What is drawn -> a command that draws it.
DRAWN = {
    "method": ("method=random",),
    "cache": ("method=none", "compressor=random_kv"),
    "both": ("method=fastv", "compressor=random_kv"),
    "first of two": ("method=random+fastv",),
    "second of two": ("method=divprune+random", "method.params.random.layer=2"),
    "draft": (
        *("model=seedling", "method=parallelvlm", "method.params.guidance=random"),
        "method.draft=seedling_draft",
    ),
    "words": ("method=none", *SAMPLED),
    "masked words": (*DENOISED, "+benchmark.generation.temperature=0.5"),
    "places": (*DENOISED, "+benchmark.generation.remasking=random"),
    "places by confidence": (*DENOISED, "+benchmark.generation.alg_temp=0.5"),
    "prompts": ("method=none", "benchmark=latency", "benchmark.prompt_tokens=256"),
    "words of a task": ("method=none", "benchmark=task:vl_rewardbench", OPEN),
}

#: Commands in which nothing is drawn.
STILL = {
    "none": ("method=none",),
    "layer": ("method=fastv",),
    "cache": ("method=none", "compressor=snapkv"),
    "two": ("method=divprune+fastv",),
    "draft": ("model=seedling", "method=parallelvlm", "method.draft=seedling_draft"),
    "idle temperature": ("method=none", "+benchmark.generation.temperature=0"),
    "denoised": DENOISED,
    "published": ("method=fastv", "benchmark=gqa", OPEN),
    "task": ("method=none", "benchmark=task:ai2d", OPEN),
}


def keys_of(store: Path, argv: tuple[str, ...]) -> set[str]:
    """The run keys of three seeds."""
    specs = [spec_of(f"store={store}", "ratio=0.5", *argv, f"seed={seed}") for seed in range(3)]
    return {admit(spec, Digests()).key for spec in specs}


@pytest.mark.sampled
@pytest.mark.parametrize("argv", DRAWN.values(), ids=DRAWN)
def test_what_is_drawn_runs_once_a_seed(tmp_path: Path, argv: tuple[str, ...]) -> None:
    assert len(keys_of(tmp_path, argv)) == 3


@pytest.mark.sampled
@pytest.mark.parametrize("argv", STILL.values(), ids=STILL)
def test_seeds_without_chance_are_one_run(tmp_path: Path, argv: tuple[str, ...]) -> None:
    assert len(keys_of(tmp_path, argv)) == 1


def test_a_task_that_samples_by_itself_runs_once_a_seed(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    settings = "generation_kwargs: {do_sample: true, temperature: 0.5}\n"
    (folder / "_words.yaml").write_text(settings)
    (folder / "own.yaml").write_text("task: own\ninclude: _words.yaml\n")
    argv = (f"benchmark.include_path={folder}", "benchmark.task=own", "benchmark.sources=[]")
    assert len(keys_of(tmp_path, ("method=none", *argv))) == 3
    (folder / "_words.yaml").write_text(settings.replace("true", "false"))
    assert len(keys_of(tmp_path, ("method=none", *argv))) == 1


def test_only_two_methods_of_the_catalogue_draw() -> None:
    drawing = {name for name in METHODS.names() if build_method(name, {}).draws}
    assert drawing == {"random", "random_kv"}


@pytest.mark.slow
def test_a_sweep_plans_each_of_them_once(tmp_path: Path) -> None:
    argv = ["-m", "method=none,fastv,random,divprune", "ratio=0.9", "seed=0,1", "limit=2"]
    result = subprocess.run(
        [sys.executable, "run.py", *argv, "--dry", f"store={tmp_path}"],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert "5 to do" in result.stdout
    assert result.stderr.count("seed: runs in which nothing is drawn are those of seed=0\n") == 1


@dataclass(frozen=True)
class Chosen(TokenReducer):
    """Draws, and does not declare it."""

    def sites(self, depth: int) -> tuple[Site, ...]:
        return (Site("prefix"),)

    def plan(self, view: View, keep: int) -> Plan:
        noise = [torch.rand(view.tokens.shape[1], generator=g) for g in view.generators]
        return Plan(top(torch.stack(noise), keep))


class ChosenAndDeclared(Chosen):
    """The same method, declared."""

    draws = True


@dataclass(frozen=True)
class Evicted(CacheCompressor):
    """Draws, and does not declare it."""

    def score(self, view: CacheView) -> Tensor:
        return torch.rand(1, len(view.candidates), generator=view.generator)


class EvictedAndDeclared(Evicted):
    """The same method, declared."""

    draws = True


@pytest.mark.parametrize(
    ("silent", "declared"), [(Chosen, ChosenAndDeclared), (Evicted, EvictedAndDeclared)]
)
def test_own_methods_declare_that_they_draw(silent: Any, declared: Any) -> None:
    picture = np.zeros((144, 144, 3), dtype=np.uint8)

    def ask(method: Any, seed: int) -> Any:
        with espalier.apply(
            espalier.load("seedling", device="cpu"), method, ratio=0.9, seed=seed
        ) as pruned:
            return pruned.ask(picture, "what is it ?")

    line = rf"{silent.__name__} draws random numbers .* valid: `draws = True` in its class"
    with pytest.raises(espalier.UserError, match=line):
        ask(silent(), 0)
    assert ask(declared(), 0).tokens
