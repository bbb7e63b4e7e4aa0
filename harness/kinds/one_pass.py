"""Which runs may answer their samples in one pass over the benchmark, up to where they part."""

from __future__ import annotations

from dataclasses import replace

from espalier.harness.kinds.lookup import in_front
from espalier.harness.kinds.reducer import WHOLE
from espalier.harness.specs.run_spec import MethodSpec, RunSpec
from espalier.methods.base import Method


def apart(spec: RunSpec, method: Method) -> str | None:
    """Return why a run answers by itself; None if it may share a pass with others."""
    engine, facts = spec.engine, spec.model.facts
    if engine.batch_size == "auto":
        return "engine.batch_size=auto is found for each cell"
    if engine.backend != "drop":
        return f"engine.backend={engine.backend} runs every layer by itself"
    if engine.separators != "keep":
        return f"engine.separators={engine.separators} counts other tokens than a whole prompt does"
    if engine.rescore:
        return "engine.rescore=true starts from pixels"
    if spec.benchmark.prompt_tokens is not None:
        return "the benchmark measures times alone"
    if facts.diffusion is not None:
        return "the model denoises its answers"
    reducer = in_front(method)
    if reducer is None:
        return "the method drafts"
    sites = reducer.all_sites(facts.tower.layers, facts.text.layers)
    if any(site.where == "tower" for site in sites):
        return "the method acts inside the vision tower"
    return None


def frame(spec: RunSpec) -> RunSpec:
    """Return what runs of one pass have in common: everything but the method and its budget."""
    return replace(spec, method=MethodSpec(""), budget=WHOLE, report=None, curves=None)
