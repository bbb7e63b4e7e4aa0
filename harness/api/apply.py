"""Check method, budget, draft and transport before the model is changed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from espalier.harness.api.applied import Applied
from espalier.harness.api.argument_errors import (
    check_instance,
    held_by_instance,
    read_path,
    unknown_argument,
    user_errors,
)
from espalier.harness.api.loaded_models import Model
from espalier.harness.api.open_method import require_amount, settle
from espalier.harness.config.build_spec import read_budget, variant_of
from espalier.harness.config.composer import compose_section
from espalier.harness.config.draft_section import build_draft
from espalier.harness.errors import UserError
from espalier.harness.kinds.lookup import stacked
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.settings import (
    CacheRatio,
    Natural,
    Text,
    choice,
    read_value,
    setting_hints,
)
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import build_method, method_class
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import (
    POSITIONS,
    TRANSPORTS,
    VARIANTS,
    CompressorSpec,
    EngineSpec,
    MethodSpec,
    ModelSpec,
    RunSpec,
)
from espalier.methods.base import Decoder, Method
from espalier.methods.compressor import CacheCompressor

__all__ = ["Applied", "apply"]

#: What `method` takes, in error lines.
METHODS_TAKEN = "a name of conf/method, <file>.py:<class>, or an instance of a TokenReducer, Decoder or CacheCompressor"

#: Share by which a method is checked before it is known whether it removes tokens.
RATIO = 0.75

#: Default of `cache_ratio`.
HALF = 0.5

#: Placeholder in the run's spec: questions from Python belong to no benchmark.
NO_BENCHMARK = BenchmarkSpec(
    name="questions", task="", include_path=None, limit=None, metrics=(), headline=""
)


def apply(
    model: Model,
    method: str | Method,
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
            (methods/base.py) or `CacheCompressor` (methods/compressor.py).
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
        if not isinstance(model, Model):
            raise UserError(
                f"model is a {type(model).__name__}; valid: the result of espalier.load or espalier.wrap"
            )
        built_method, method_spec = _build(method, params, variant)
        arguments = {
            "method": method_spec,
            "transport": transport,
            "compare": compare,
            "draft": draft.spec.name if isinstance(draft, Model) else draft,
            "cache_ratio": cache_ratio,
            "evicts": compressor is not None,
            "budget": {"ratio": ratio, "count": keep},
        }
        refuse("arguments", arguments, built_method)
        if compressor is not None:
            evictor, evictor_spec = _build(compressor, {})
            cache_share = read_value(
                "cache_ratio", HALF if cache_ratio is None else cache_ratio, CacheRatio
            )
            built_method = stacked(
                built_method, evictor, cache_share, (method_spec.name, evictor_spec.name)
            )
            method_spec = replace(
                method_spec,
                compressor=CompressorSpec(
                    evictor_spec.name, evictor_spec.params, cache_share, evictor_spec.code
                ),
            )
        if getattr(keep, "ndim", None) == 0:
            keep = keep.item()  # type: ignore[union-attr]  # a number of numpy or torch
        draft_model, draft_spec = _resolve_draft(model, built_method, draft)
        read_value("transport", transport, Text | None)
        engine = EngineSpec(
            batch_size="auto",
            positions=choice("positions", positions, POSITIONS),
            transport=choice(
                "transport",
                transport or _default_transport(built_method, draft_model, model),
                TRANSPORTS,
            ),
            compare=read_value("compare", compare, bool),
        )
        spec = RunSpec(
            model=model.spec,
            method=replace(method_spec, draft=draft_spec),
            benchmark=NO_BENCHMARK,
            budget=read_budget(
                budget,
                RATIO if ratio is None else ratio,
                keep,
                built_method.drafts,
                model.spec.facts,
            ),
            engine=engine,
            seed=read_value("seed", seed, Natural),
            force=False,
            log="none",
            store=read_path("store", DEFAULT_STORE if store is None else store),
        )
        has_own_draft = draft_model is not None and draft_model.borrowed
        checked = settle(spec, built_method, model.borrowed, has_own_draft)
        require_amount(checked.spec, ratio, keep)
        return Applied(checked, model, draft_model)


#: What `apply` takes, besides hyper-parameters.
ARGUMENTS = tuple(name for name in inspect.signature(apply).parameters if name != "params")


def _build(
    method: str | Method, params: Mapping[str, Any], variant: str | None = None
) -> tuple[Method, MethodSpec]:
    """Return the requested method and its spec, which holds the name for error lines."""
    if isinstance(method, str):
        values = []
        if variant is not None:
            values.append(f"method.variant={choice('variant', variant, VARIANTS)}")
        section = compose_section("method", method, values=values)
        name, code = section["name"], section.get("code")
        hints = setting_hints(method_class(name, code))
        for key, value in params.items():
            if key not in hints:
                raise unknown_argument(key, value, method, hints, ARGUMENTS)
        merged, variants = {**(section["params"] or {}), **params}, section.get("variants") or {}
        method_spec = MethodSpec(name, variant_of("method", section), merged, variants, code=code)
        return build_method(name, merged, code), method_spec
    check_instance(method, METHODS_TAKEN)
    if variant is not None:
        raise UserError(f"variant={variant!r} is for a name of conf/method; valid: without variant")
    for name, value in params.items():
        raise held_by_instance(name, value, method, ARGUMENTS)
    return method, MethodSpec(type(method).__name__)


def _resolve_draft(
    model: Model, method: Method, draft: str | PathLike[str] | Model | None
) -> tuple[Model | None, ModelSpec | None]:
    """Return the draft, if the caller loaded it, and the draft's spec."""
    # On diffusion models a later check refuses methods that draft.
    if not method.takes_draft or model.spec.facts.denoises:
        return None, None
    if isinstance(draft, Model):
        return draft, draft.spec
    if draft is None and not model.spec.drafts:
        raise UserError(
            f"draft=None: model={model.spec.name!r} names no draft; valid: a name of conf/model, the folder of a "
            "checkpoint, a loaded model"
        )
    return None, build_draft(None if draft is None else fspath(draft), {}, model.spec)


def _default_transport(method: Method, draft: Model | None, target: Model) -> str:
    """Return the default transport: another process can neither share a model in memory nor import a notebook."""
    by_itself = draft is None or not draft.borrowed
    if by_itself and type(method).__module__ != "__main__":
        return "auto"
    overlap = isinstance(method, Decoder) and method.overlap and draft is not target
    return "threads" if overlap else "sequential"
