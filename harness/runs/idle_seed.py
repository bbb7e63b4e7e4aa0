"""Seeds of runs in which nothing is drawn: they are one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from espalier.harness.config.lmms_task_files import Index, library
from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.errors import tell_once
from espalier.harness.specs.generation import has_sampled_answers, settings_of
from espalier.harness.specs.run_spec import RunSpec
from espalier.harness.store.files.digests import Digests
from espalier.methods.base import Method


def without_idle_seed(
    spec: RunSpec, method: Method, index: Index | None, digests: Digests
) -> RunSpec:
    """Return the run with the seed 0 if neither its method, its answers nor its prompts are drawn.

    Args:
        spec: the run.
        method: its method.
        index: the tasks of its own folder; None: it has none.
        digests: remembers the settings of tasks over a sweep.
    """
    bench = spec.benchmark
    if spec.seed == 0 or method.draws or bench.prompt_tokens is not None:
        return spec
    tasks = index if index is not None and bench.task in index.names else library()
    leaves = digests.once(
        ("settings of tasks", bench.include_path, bench.task), lambda: tasks.leaves(bench.task)
    )
    for leaf in leaves:
        # The settings of a task in Python are known once it is built.
        if "class" in leaf.settings or _drawn(spec, leaf.settings.get("generation_kwargs") or {}):
            return spec
    tell_once("seed: runs in which nothing is drawn are those of seed=0")
    return replace(spec, seed=0)


def _drawn(spec: RunSpec, task: Mapping[str, Any]) -> bool:
    """Return whether answers to a task are drawn; `task` has its own settings."""
    facts = spec.model.facts
    if facts.diffusion is not None:
        return Denoising.of(settings_of(spec, task).generate, facts.diffusion).draws
    return facts.canvas is not None or has_sampled_answers(spec, task)
