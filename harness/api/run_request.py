"""The arguments of `apply` and `evaluate` as a run: composed as from a command line, with the caller's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, cast

from espalier.harness.api.argument_errors import (
    check_instance,
    held_by_instance,
    unknown_argument,
)
from espalier.harness.api.loaded_models import Model
from espalier.harness.config.build_spec import NO_COMPRESSOR, build_spec
from espalier.harness.config.cell_settings import read_amount, read_settings
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import compose_section
from espalier.harness.config.group_lists import merged
from espalier.harness.config.method_names import is_combination
from espalier.harness.config.overrides import spelled
from espalier.harness.errors import UserError
from espalier.harness.kinds.kind import params_of
from espalier.harness.kinds.lookup import method_of
from espalier.harness.settings import PLUS, setting_hints
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.records.record import RecordSettings
from espalier.harness.specs.run_spec import EngineSpec, RunSpec
from espalier.methods.base import Method, MethodError
from espalier.methods.composed import Combined
from espalier.methods.compressor import CacheCompressor

#: Arguments that have another place in the config. Not every method has a draft, so its key is added.
PLACES = {
    **{name: f"engine.{name}" for name in setting_hints(EngineSpec)},
    "cache_ratio": "compressor.ratio",
    "draft": "++method.draft",
    "variant": "method.variant",
    **{name: f"benchmark.{name}" for name in ("name", *setting_hints(RecordSettings))},
}

#: Keys of the sections of a method and a compressor that an instance of one leaves to its run.
BESIDE_OBJECTS = ("draft", "ratio")

#: What each place takes: the types, and their words in error lines.
TAKEN: Mapping[str, tuple[tuple[type, ...], str]] = {
    "model": (
        (str, PathLike, Model),
        "a name of conf/model, or the result of espalier.load or espalier.wrap",
    ),
    "method": (
        (str, Method),
        "a name of conf/method, <file>.py:<class>, an instance of a TokenReducer, Decoder or CacheCompressor, or a "
        "list of two TokenReducers",
    ),
    "compressor": ((str, CacheCompressor), "a name, or an instance of a CacheCompressor"),
}


@dataclass(frozen=True)
class RunRequest:
    """A run as it is requested.

    Attributes:
        spec: the run.
        argv: the command line of its parts that have a name.
        method: the built method, with its compressor.
    """

    spec: RunSpec
    argv: Sequence[str]
    method: Method


def read_request(
    model: str | PathLike[str] | Model,
    method: str | Method,
    settings: Mapping[str, Any],
    benchmark: BenchmarkSpec | None = None,
    draft: Model | None = None,
) -> RunRequest:
    """Return the run that `apply` or `evaluate` has to do.

    Args:
        model: a name, or a model in memory.
        method: a name, or an instance.
        settings: by config key; `compressor` may be an instance.
        benchmark: in place of the section that `settings` choose.
        draft: a loaded draft model.

    Raises:
        UserError: one line with the argument, its value and what is valid.
    """
    values = {"model": model, "method": method, "compressor": NO_COMPRESSOR, **settings}
    for key, (types, valid) in TAKEN.items():
        check_instance(key, values[key], types, valid)
    methods = {key: value for key, value in values.items() if isinstance(value, Method)}
    evicts = values["compressor"] != NO_COMPRESSOR
    refuse("arguments", {"cache_ratio": settings.get("compressor.ratio"), "evicts": evicts})
    _refuse_settled(settings, {"model": model, **methods})
    if getattr(settings.get("keep"), "ndim", 0):
        read_amount(None, settings["keep"], drafts=False)  # raises UserError
    named = {"model": model, "method": method, **settings}
    named |= {key: _composed_name(value) for key, value in methods.items()}
    if isinstance(model, Model):
        # Expressions of a method's file may choose by the family.
        named |= {"model": model.name, "model.adapter": model.spec.adapter}
    argv = [
        f"{key}={spelled(value, key.lstrip('+'))}"
        for key, value in named.items()
        if (key, value) != ("model", None)
    ]
    command = read_command(argv)
    cell = dict(command.cells[0])
    cell |= {key: _section(value, cell[key]) for key, value in methods.items()}
    model_spec = None
    if isinstance(model, Model) and model.name is None:
        model_spec = model.spec  # a model without a file states all of its settings
    elif isinstance(model, Model):
        cell["model"] = merged(cell["model"], model.settings)
    run = read_settings(cell)
    if benchmark is not None:
        run = replace(run, benchmark=benchmark)
    spec = build_spec(
        run, model_spec, methods.get("method"), draft=None if draft is None else draft.spec
    )
    built = method_of(spec.method, methods.get("method"), methods.get("compressor"))
    return RunRequest(spec, command.argv, built)


#: What `apply` and `evaluate` take as a method.
Methods = str | Method | Sequence[str | Method]


def read_method(method: Methods) -> str | Method:
    """Return a method as it is, and of a list of two their combination: a name where both are names of conf/method.

    Raises:
        UserError: the list does not hold two methods, or they cannot act one after the other.
    """
    if not isinstance(method, list | tuple):
        return cast("str | Method", method)
    for part in method:
        check_instance("method", part, *TAKEN["method"])
    if len(method) != 2:
        raise UserError(f"method is a list of {len(method)}; valid: two methods")
    names = [part for part in method if isinstance(part, str)]
    if len(names) == 2 and is_combination(PLUS.join(names)):
        return PLUS.join(names)
    try:
        return Combined(*map(_built, method))
    except MethodError as error:
        raise UserError(f"method: {error}") from error


def _built(method: str | Method) -> Any:
    """Return the method of a name, with the hyper-parameters of its file."""
    if isinstance(method, Method):
        return method
    section = compose_section("method", method)
    return build_method(section["name"], section["params"] or {}, section.get("code"))


def parameter_key(name: str, value: Any, method: str | Method, arguments: Iterable[str]) -> str:
    """Return the config key of a hyper-parameter.

    Args:
        name: of an argument that the function does not have.
        value: of it.
        method: a name, or an instance.
        arguments: those that the function has, for the error line.

    Raises:
        UserError: the method has no such hyper-parameter, or is an instance, which holds its own.
    """
    if isinstance(method, str):
        if name in parameters(method):
            return f"method.params.{name}"
        raise unknown_argument(name, value, method, parameters(method), arguments)
    check_instance("method", method, *TAKEN["method"])
    raise held_by_instance(name, value, method, arguments)


def parameters(method: str) -> Mapping[str, Any]:
    """Return the hyper-parameters of a name of conf/method, each with its default. Cost: 20 ms."""
    params: Mapping[str, Any] = compose_section("method", method)["params"]
    return params or {}


def _refuse_settled(settings: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Raise UserError for a key of a section that an object in memory has settled."""
    for name, value in settings.items():
        part, _, key = name.partition(".")
        settled = isinstance(objects.get(part), Model | Method)
        if not settled or not key or key.startswith(BESIDE_OBJECTS):
            continue
        maker = "espalier.load or espalier.wrap" if part == "model" else "the call that made it"
        raise UserError(
            f"{name}={value!r}: the {part} is an object with settings of its own; valid: without {name}, or "
            f"{key.rpartition('.')[2]} in {maker}"
        )


def _composed_name(method: Method) -> str:
    """Return the name of conf/method that an instance is composed by; for a class without a file that of its kind."""
    return registered_name(type(method)) or ("vanilla_sd" if method.takes_draft else "none")


def registered_name(method_class: type[Method]) -> str | None:
    """Return the name of a method of the repository; None for a class of the caller's."""
    module = method_class.__module__.rpartition(".")[2]
    return module if module in METHODS and METHODS.load(module) is method_class else None


def _section(method: Method, composed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of an instance: of a class of the repository with its hyper-parameters."""
    if isinstance(method, Combined):
        names = [registered_name(type(part)) or type(part).__name__ for part in method.parts]
        params = dict(zip(names, map(params_of, method.parts), strict=True))
        values = {"first_ratio": method.first_ratio, **params}
        return {**composed, "name": PLUS.join(names), "variant": "paper", "params": values}
    name = registered_name(type(method))
    if name is None:
        class_name = type(method).__name__
        if class_name in METHODS:
            raise UserError(
                f"method: the class {class_name} has the name of a method of conf/method; valid: another class name"
            )
        return {**composed, "name": class_name, "variant": "paper", "params": {}, "variants": {}}
    params = params_of(method)
    variants = composed.get("variants") or {composed["variant"]: {}}
    equal = (key for key in variants if build_method(name, params | variants[key]) == method)
    return {**composed, "variant": next(equal, "paper"), "params": params}
