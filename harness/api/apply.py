"""Check method, budget, draft and transport before the model is changed."""

from __future__ import annotations

import inspect
from dataclasses import replace
from os import PathLike
from typing import Any

from espalier.harness.api.applied import Applied
from espalier.harness.api.argument_errors import check_instance, user_errors
from espalier.harness.api.loaded_models import Model
from espalier.harness.api.open_method import require_amount, settle
from espalier.harness.api.run_request import (
    PLACES,
    Methods,
    parameter_key,
    read_method,
    read_request,
)
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.conflicts import refuse
from espalier.methods.base import Decoder, Method
from espalier.methods.compressor import CacheCompressor

__all__ = ["Applied", "apply"]

#: Placeholder in the run's spec: questions from Python belong to no benchmark.
NO_BENCHMARK = BenchmarkSpec(
    name="questions",
    task="",
    kind="questions",
    include_path=None,
    limit=None,
    metrics=(),
    headline="",
)


def apply(
    model: Model,
    method: Methods,
    ratio: float | None = None,
    *,
    keep: int | str | None = None,
    variant: str | None = None,
    budget: str = "kept",
    draft: str | PathLike[str] | Model | None = None,
    seed: int = 0,
    positions: str = "original",
    transport: str | None = None,
    compare: bool = False,
    compressor: str | CacheCompressor | None = None,
    cache_ratio: float | None = None,
    store: str | PathLike[str] | None = None,
    **params: Any,
) -> Applied:
    """Apply a method to a model: `with espalier.apply(model, "fastv", ratio=0.9) as pruned:`.

    All checks run here; the model is changed only inside the `with`.

    Args:
        model: result of `load` or `wrap`.
        method: name of a file in conf/method without `.yaml` (variants included), the place of your own class
            (`mine.py:MyMethod`, `package.module:MyMethod`), or an instance of your own `TokenReducer`, `Decoder`
            (methods/base.py) or `CacheCompressor` (methods/compressor.py). Or a list of two that drop tokens: the
            second acts on what the first has left, and `ratio` is that of both.
        variant: which reading of the file: `official`, the released code, or `paper`; None: the file's default.
        ratio: share of visual tokens removed, 0 <= ratio < 1; for a speculative decoder, removed from its draft. Every
            method that removes tokens needs it, or `keep`.
        keep: instead of `ratio`, the visual tokens that stay of each question's media, or their share, `"10%"`.
        budget: rule that counts them: `kept`, `average`, `flops` or `kv_bytes` (docs/rows.md).
        draft: draft model of a speculative decoder: name of a file in conf/model, folder of a checkpoint, or a loaded
            model; None: the first draft that the model's file names.
        seed: seed of random methods and of sampling.
        positions: position ids of kept tokens: `original`, `renumbered` or `method`.
        transport: how the draft runs next to the target: `sequential`, `processes` or `threads`; None: the fastest that
            the machine and both models support.
        compare: also decode without the draft, for `answer.decoding.speedup`.
        compressor: evicts cache entries of the tokens that the method keeps: name of a file in conf/method, or an
            instance of a `CacheCompressor` (methods/compressor.py) with its hyper-parameters; None: no eviction.
        cache_ratio: share of these entries that is evicted, 0 <= cache_ratio < 1; None: half.
        store: run store searched first for calibrations; None: `results` in the working directory.
        **params: hyper-parameters of the method; they override those of its file.

    Raises:
        UserError: one line with the argument, its value and what is valid.
    """
    with user_errors():
        check_instance("model", model, Model, "the result of espalier.load or espalier.wrap")
        method = read_method(method)
        loaded = draft if isinstance(draft, Model) else None
        arguments = {
            **{"ratio": ratio, "keep": keep, "budget": budget, "variant": variant, "seed": seed},
            **{"positions": positions, "transport": transport, "compare": compare or False},
            **{"compressor": compressor, "cache_ratio": cache_ratio, "store": store},
            **{"draft": None if loaded else draft, "batch_size": "auto"},
        }
        settings = {
            **{PLACES.get(k, k): value for k, value in arguments.items() if value is not None},
            **{parameter_key(k, value, method, ARGUMENTS): value for k, value in params.items()},
        }
        # The model has the settings with which it was loaded, not those of its file for a benchmark.
        request = read_request(replace(model, name=None), method, settings, NO_BENCHMARK, loaded)
        spec = replace(request.spec, benchmark=NO_BENCHMARK)
        decoding = {"method": spec.method, "transport": transport, "compare": compare}
        refuse("arguments", decoding, request.method)
        if spec.method.draft is None:
            loaded = None
        if transport is None:
            usual = _default_transport(request.method, loaded, model)
            spec = replace(spec, engine=replace(spec.engine, transport=usual))
        draft_borrowed = loaded is not None and loaded.borrowed
        checked = settle(spec, request.method, model.borrowed, draft_borrowed)
        require_amount(checked.spec, ratio, keep)
        return Applied(checked, model, loaded)


#: What `apply` takes, besides hyper-parameters.
ARGUMENTS = tuple(name for name in inspect.signature(apply).parameters if name != "params")


def _default_transport(method: Method, draft: Model | None, target: Model) -> str:
    """Return the default transport: another process can neither share a model in memory nor import a notebook."""
    by_itself = draft is None or not draft.borrowed
    if by_itself and type(method).__module__ != "__main__":
        return "auto"
    overlap = isinstance(method, Decoder) and method.overlap and draft is not target
    return "threads" if overlap else "sequential"
