"""Which runs may share one pass over the benchmark, up to the layer where they diverge."""

from __future__ import annotations

from dataclasses import replace

from espalier.harness.kinds.lookup import kind_of
from espalier.harness.kinds.reducer import WHOLE
from espalier.harness.specs.run_spec import MethodSpec, RunSpec
from espalier.methods.base import Method


def why_not_shared(spec: RunSpec, method: Method) -> str | None:
    """Return why a run cannot share a pass with others; None if it can."""
    engine, facts = spec.engine, spec.model.facts
    if engine.batch_size == "auto":
        return "engine.batch_size=auto is found for each cell"
    if engine.backend != "drop":
        return f"engine.backend={engine.backend} runs every layer by itself"
    if engine.separators != "keep":
        return f"engine.separators={engine.separators} counts other tokens than a whole prompt does"
    if engine.scope != "prompt":
        return f"engine.scope={engine.scope} chooses in each picture by itself"
    if engine.rescore:
        return "engine.rescore=true starts from pixels"
    if engine.meters:
        return f"engine.{engine.meters[0]}=true counts every answer by itself"
    if spec.benchmark.prompt_tokens is not None:
        return "the benchmark measures times alone"
    if facts.diffusion is not None:
        return "the model denoises its answers"
    reducer = kind_of(method, spec).prompt_reducer(method)
    if reducer is None:
        return "the method drafts"
    if reducer.shrinks_pictures:
        return "the method changes the pictures"
    sites = reducer.all_sites(facts.tower.layers, facts.text.layers)
    if any(site.where == "tower" for site in sites):
        return "the method acts inside the vision tower"
    return None


def frame(spec: RunSpec) -> RunSpec:
    """Return the part of a spec that runs of one pass have in common: all but the method and its budget."""
    return replace(spec, method=MethodSpec(""), budget=WHOLE, report=None, curves=None)
