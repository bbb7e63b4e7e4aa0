"""Refusals of `backend=vllm`: limits of another engine are checked before it starts."""

from __future__ import annotations

from dataclasses import fields

from espalier.harness.cost.facts import OF_CLASS_TOKEN
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.checks.signal_check import signals_of
from espalier.harness.kinds.identity import params_of
from espalier.harness.models.families import ADAPTERS
from espalier.harness.runs.served.engine_process import engine_version
from espalier.harness.runs.served.engine_server import server_version
from espalier.harness.settings import ANY_ENGINE, marked
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.run_spec import BackendSpec, EngineSpec, RunSpec
from espalier.methods.base import Method, TokenReducer
from espalier.serve.families import FAMILIES
from espalier.serve.plugin import TESTED
from espalier.serve.setting import Setting, SettingError


def check_backend(spec: RunSpec, method: Method, loads: bool = False) -> None:
    """Check that another engine can answer a run; nothing to check where the harness answers.

    Args:
        spec: the run.
        method: its method.
        loads: whether only times count, so that weights may be random.

    Raises:
        UserError: a setting that the engine does not have, or no engine.
        Refused: the method or the model cannot be served.
    """
    backend = spec.backend
    if not backend.served:
        return
    _check_version(backend, loads)
    _check_settings(spec)
    _check_model(spec, loads)
    if not isinstance(method, TokenReducer) or spec.method.code is not None:
        raise Refused(
            f"backend=vllm serves token reducers of methods/; method={spec.method.title!r} is none"
        )
    if backend.built_in:
        _check_built_in(spec, method)
        return
    facts = spec.model.facts
    if method.all_sites(facts.tower.layers, facts.text.layers):
        try:
            Setting(spec.method.name, params_of(method)).sites(facts.text.layers)
        except SettingError as error:
            raise Refused(f"backend=vllm: {error}") from error
    if facts.class_attention == "probe" and OF_CLASS_TOKEN.intersection(signals_of(method, facts)):
        raise Refused(
            f"method={spec.method.name!r} reads the pooling head of model={spec.model.name!r}, which vLLM does not "
            "build; valid: backend=transformers"
        )


def _check_version(backend: BackendSpec, loads: bool) -> None:
    url, python = backend.url, backend.python
    if url is not None and (loads or python is not None):
        raise UserError(
            f"backend.url={url!r}: "
            + (
                "engines of a benchmark are started anew"
                if loads
                else "backend.python is set as well"
            )
            + f"; valid: {'backend.python' if loads else 'one of both'}"
        )
    if url is not None and backend != BackendSpec(name=backend.name, url=url):
        raise UserError(
            f"backend.url={url!r}: a server has its own parallelism and options; valid: those of `vllm serve`"
        )
    if python is None and url is None:
        raise UserError(
            "backend=vllm needs backend.python, the interpreter of an environment with vllm, or backend.url, a server "
            "of it; valid: docs/serve.md"
        )
    if url is not None:
        place, version = f"backend.url={url!r}", server_version(url)
    else:
        assert python is not None
        place, version = f"backend.python={str(python)!r}", engine_version(python)
    if version not in TESTED:
        raise UserError(
            f"{place} has vllm {version}, which was not tested; valid: {', '.join(TESTED)}"
        )


def _check_settings(spec: RunSpec) -> None:
    engine, known = spec.engine, marked(EngineSpec, ANY_ENGINE)
    for field in fields(engine):
        name, value, valid = field.name, getattr(engine, field.name), field.default
        if value != valid and name not in known:
            raise UserError(
                f"engine.{name}={value!r} is a setting of backend=transformers; valid with backend=vllm: {valid!r}"
            )
    if engine.batch_size == "auto":
        raise UserError(
            "engine.batch_size='auto' tries out memory of this process; valid with backend=vllm: a number"
        )
    if spec.benchmark.prompt_tokens is not None:
        raise UserError(
            f"benchmark={spec.benchmark.name!r} times the harness's own engine; valid: backend=transformers"
        )


def _check_built_in(spec: RunSpec, method: Method) -> None:
    """Check that vLLM itself has a method: videos alone, a ratio, no hyper-parameters, positions of the whole video."""
    model, name = spec.model, spec.method.name
    built_in = FAMILIES[ADAPTERS.load(model.adapter).data.model_class.__name__].built_in
    place = "backend.pruning='vllm'"
    if name not in built_in:
        raise Refused(
            f"{place}: vLLM has no method={name!r} of its own for model={model.name!r}; valid: "
            f"{', '.join(built_in) or 'backend.pruning=espalier'}"
        )
    plain = build_method(name, {})
    if method != plain:
        raise UserError(
            f"{place}: vLLM's {name} takes no hyper-parameters; valid: {params_of(plain)}"
        )
    if spec.budget.count is not None:
        raise UserError(f"{place}: keep={spec.budget.count} is no share; valid: ratio=<a number>")


def _check_model(spec: RunSpec, loads: bool) -> None:
    model = spec.model
    if (model.weights == "random" and not loads) or model.in_memory is not None:
        raise UserError(
            f"model={model.name!r} has no checkpoint for backend=vllm to load; valid: model.weights=trained"
        )
    name = ADAPTERS.load(model.adapter).data.model_class.__name__
    if name not in FAMILIES or model.facts.denoises:
        valid = ", ".join(FAMILIES)
        raise Refused(
            f"model={model.name!r} is a {name}, which backend=vllm does not serve; valid: {valid}"
        )
