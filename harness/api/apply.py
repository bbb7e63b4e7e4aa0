"""Which method, budget, draft and transport are asked for, checked before the model is touched."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from espalier.harness.api.applied import Applied, plain_errors
from espalier.harness.api.loaded_models import Model, named_spec
from espalier.harness.api.open_method import settle
from espalier.harness.config.build_spec import build_draft, variant_of
from espalier.harness.config.compose import compose_section
from espalier.harness.cost.budget import Budget
from espalier.harness.errors import UserError
from espalier.harness.kinds.lookup import as_decoder
from espalier.harness.kinds.method_stack import stacked
from espalier.harness.paths import ROOT
from espalier.harness.specs import value_checks as fields
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import build_method
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
from espalier.methods.base import Method
from espalier.methods.compressor import CacheCompressor

__all__ = ["Applied", "apply"]

#: There is no benchmark where a person asks.
NO_BENCHMARK = BenchmarkSpec(
    name="questions", task="", include_path=None, limit=None, metrics=(), headline=""
)


def apply(
    model: Model,
    method: str | Method,
    ratio: float = 0.75,
    *,
    variant: str | None = None,
    budget: str = "kept",
    draft: str | PathLike[str] | Model | None = None,
    seed: int = 0,
    positions: str = "original",
    transport: str | None = None,
    compare: bool = False,
    compressor: str | CacheCompressor | None = None,
    cache_ratio: float = 0.5,
    store: str | PathLike[str] | None = None,
    **params: Any,
) -> Applied:
    """Put a method on a model: `with espalier.apply(model, "fastv", ratio=0.9) as pruned:`.

    Everything that can be refused is refused here; the model is changed inside the `with` alone.

    Args:
        model: what `load` or `wrap` returned.
        method: a file of conf/method without `.yaml`, or an instance of an own `TokenReducer`,
            `Decoder` (methods/base.py) or `CacheCompressor` (methods/compressor.py), registered or not.
        variant: which reading of the file: `official`, the released code, or `paper`; None: the file's default.
        ratio: share of visual tokens removed, 0 <= ratio < 1; of a speculative decoder, the share that its draft does
            without.
        budget: how the ratio is counted: `kept`, `average` or `flops` (docs/rows.md).
        draft: who drafts for a speculative decoder: a file of conf/model, the folder of a checkpoint, or a loaded
            model; None: the first that the model's file names.
        seed: of methods that choose by chance, and of sampling.
        positions: of kept tokens: `original`, `renumbered` or `method`.
        transport: how a draft runs beside its target: `sequential`, `processes` or `threads`; None: the best that the
            machine has and both models allow.
        compare: whether a decoder's answers are decoded plainly too, for `answer.decoding.speedup`.
        compressor: what evicts cache entries of the tokens that the method leaves: a file of conf/method, or an
            instance of a `CacheCompressor` (methods/compressor.py) with hyper-parameters of its own; None: nothing.
        cache_ratio: share of these entries that goes, 0 <= cache_ratio < 1.
        store: the run store whose calibrations are looked at first; None: `results` of the checkout.
        **params: the method's hyper-parameters, over those of its file.

    Raises:
        UserError: one line with the argument, its value and what is valid.
    """
    with plain_errors():
        if not isinstance(model, Model):
            raise UserError(
                f"model is a {type(model).__name__}; valid: what espalier.load or espalier.wrap returned"
            )
        built, named = _built(method, params, variant)
        if compressor is not None:
            behind, other = _built(compressor, {})
            share = fields.cache_ratio("cache_ratio", cache_ratio)
            built = stacked(built, behind, share, (named.name, other.name))
            named = replace(named, compressor=CompressorSpec(other.name, other.params, share))
        drafting, asked = _drafting(model, built, named.name, draft)
        removed = fields.draft_ratio if built.drafts else fields.ratio
        fields.optional_text("transport", transport)
        engine = EngineSpec(
            batch_size=0,
            positions=fields.choice("positions", positions, POSITIONS),
            transport=fields.choice(
                "transport", transport or _transport(built, drafting, model), TRANSPORTS
            ),
            compare=fields.flag("compare", compare),
        )
        spec = RunSpec(
            model=model.spec,
            method=replace(named, draft=asked),
            benchmark=NO_BENCHMARK,
            budget=Budget(budget, removed("ratio", ratio)),
            engine=engine,
            seed=fields.integer("seed", seed, at_least=0),
            force=False,
            log="none",
            store=ROOT / "results" if store is None else Path(store).expanduser().absolute(),
        )
        known = drafting.spec if drafting is not None and drafting.borrowed else None
        return Applied(settle(spec, built, model.borrowed, known), model, drafting)


def _built(
    method: str | Method, params: Mapping[str, Any], variant: str | None = None
) -> tuple[Method, MethodSpec]:
    """Return the method that is asked for, and what its errors call it."""
    if isinstance(method, str):
        chosen = [] if variant is None else [fields.choice("variant", variant, VARIANTS)]
        values = [f"method.variant={one}" for one in chosen]
        section = compose_section("method", method, values=values)
        merged = {**(section["params"] or {}), **params}
        named = MethodSpec(section["name"], variant_of("method", section), merged)
        return build_method(named.name, merged), named
    if inspect.isclass(method) and issubclass(method, Method):
        raise UserError(
            f"method={method.__name__} is a class; valid: an instance, {method.__name__}(...)"
        )
    if not isinstance(method, Method):
        raise UserError(
            f"method={method!r}; valid: a name of conf/method, or an instance of a "
            "TokenReducer or Decoder of espalier.methods.base"
        )
    if variant is not None:
        raise UserError(f"variant={variant!r} is for a name of conf/method; valid: without variant")
    if params:
        raise UserError(
            f"{next(iter(params))}: a method that is an object has its own hyper-parameters; valid: "
            f"{type(method).__name__}({next(iter(params))}=...)"
        )
    return method, MethodSpec(type(method).__name__)


def _drafting(
    model: Model, method: Method, name: str, draft: str | PathLike[str] | Model | None
) -> tuple[Model | None, ModelSpec | None]:
    """Return the loaded draft, where somebody loaded it, and the draft's spec."""
    if not method.takes_draft:
        if draft is not None:
            raise UserError(f"draft: method={name!r} takes no draft model; valid: without draft")
        return None, None
    if model.spec.facts.diffusion is not None:
        return None, None  # whoever takes a draft is refused together with the model
    if isinstance(draft, Model):
        return draft, draft.spec
    if draft is None and not model.spec.drafts:
        raise UserError(
            f"draft=None: model={model.spec.name!r} names no draft of its own; valid: a name of conf/model, the folder "
            "of a checkpoint, a loaded model"
        )
    if draft is not None and (Path(draft).expanduser() / "config.json").is_file():
        asked = named_spec(draft, None, {"dtype": model.spec.dtype})
        return None, replace(asked, video=model.spec.video)
    return None, build_draft(None if draft is None else str(draft), {}, model.spec)


def _transport(method: Method, drafting: Model | None, target: Model) -> str:
    """Return how a draft runs where nobody says: another process can neither borrow a model nor import a notebook."""
    by_itself = drafting is None or not drafting.borrowed
    if by_itself and type(method).__module__ != "__main__":
        return "auto"
    decoder = as_decoder(method)
    overlap = decoder is not None and decoder.overlap and drafting is not target
    return "threads" if overlap else "sequential"
