"""Refusals of `backend=vllm`: limits of another engine are checked before it starts."""

from __future__ import annotations

from dataclasses import fields

from espalier.harness.cost.facts import OF_CLASS_TOKEN
from espalier.harness.errors import Refused, UserError
from espalier.harness.kinds.kind import params_of
from espalier.harness.kinds.signal_check import signals_of
from espalier.harness.models.families import ADAPTERS
from espalier.harness.runs.served.engine_process import engine_version
from espalier.harness.runs.served.engine_server import server_version
from espalier.harness.settings import ANY_ENGINE, marked
from espalier.harness.specs.catalogue import build_method
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.run_spec import BackendSpec, EngineSpec, ModelSpec, RunSpec
from espalier.methods.base import Method, TokenReducer
from espalier.serve.adapter import TESTED
from espalier.serve.families import FAMILIES
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
    _check_version(spec, loads)
    engine, any_engine = spec.engine, marked(EngineSpec, ANY_ENGINE)
    for field in fields(engine):
        name, value, valid = field.name, getattr(engine, field.name), field.default
        if value != valid and name not in any_engine:
            raise UserError(
                f"engine.{name}={value!r} is a setting of backend=transformers; valid with backend=vllm: {valid!r}"
            )
    family = ADAPTERS.load(spec.model.adapter).data.model_class.__name__
    refuse(
        "vllm",
        spec,
        method,
        loads=loads,
        family=family,
        families=FAMILIES,
        served=", ".join(FAMILIES),
        reduces=isinstance(method, TokenReducer) and len(method.parts) == 1,
    )
    if backend.built_in:
        name, built_in = spec.method.name, FAMILIES[family].built_in
        valid = ", ".join(built_in) or "backend.pruning=espalier"
        plainly = build_method(name, {})
        refuse(
            "pruning of vllm",
            spec,
            method,
            built_in=built_in,
            methods=valid,
            plain=plainly,
            params=params_of(plainly),
        )
        return
    assert isinstance(method, TokenReducer)  # others are refused
    check_method(spec.model, spec.method.name, method)


def check_method(model: ModelSpec, name: str, method: TokenReducer) -> None:
    """Raise Refused for a method that vLLM cannot run on a model."""
    facts = model.facts
    if method.all_sites(facts.tower.layers, facts.text.layers):
        try:
            Setting(name, params_of(method)).sites(facts.text.layers)
        except SettingError as error:
            raise Refused(f"backend=vllm: {error}") from error
    if facts.class_attention == "probe" and OF_CLASS_TOKEN.intersection(signals_of(method, facts)):
        raise Refused(
            f"method={name!r} reads the pooling head of model={model.name!r}, which vLLM does not "
            "build; valid: backend=transformers"
        )


def _check_version(spec: RunSpec, loads: bool) -> None:
    backend, url, python = spec.backend, spec.backend.url, spec.backend.python
    is_plain = backend == BackendSpec(name=backend.name, url=url)
    refuse("a server of vllm", spec, loads=loads, is_plain=is_plain)
    if url is not None:
        place, version = f"backend.url={url!r}", server_version(url)
    else:
        assert python is not None
        place, version = f"backend.python={str(python)!r}", engine_version(python)
    if version not in TESTED:
        raise UserError(
            f"{place} has vllm {version}, which was not tested; valid: {', '.join(TESTED)}"
        )
