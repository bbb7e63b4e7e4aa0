"""The arguments of `evaluate` as a cell: composed as from a command line, with objects of the caller put in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.harness.api.apply import METHODS_TAKEN
from espalier.harness.api.argument_errors import (
    check_instance,
    held_by_instance,
    unknown_argument,
)
from espalier.harness.api.loaded_models import Model
from espalier.harness.api.open_method import refuse_calibrated
from espalier.harness.config.build_spec import NO_COMPRESSOR, build_spec
from espalier.harness.config.cell_settings import RUN_KEYS
from espalier.harness.config.compose import read_command
from espalier.harness.config.composer import compose_section
from espalier.harness.config.group_lists import merged
from espalier.harness.config.overrides import spelled
from espalier.harness.errors import UserError
from espalier.harness.kinds.kind import params_of
from espalier.harness.kinds.lookup import stacked
from espalier.harness.models.weights_digest import weights_digest
from espalier.harness.settings import read_section, setting_hints
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.catalogue import METHODS, build_method
from espalier.harness.specs.conflicts import refuse
from espalier.harness.specs.records.data_file import is_data
from espalier.harness.specs.records.own_data import save_records
from espalier.harness.specs.records.record import RecordSettings
from espalier.harness.specs.run_spec import EngineSpec, ModelSpec, RunSpec
from espalier.harness.store.files.dataset_copies import cache_folder
from espalier.methods.base import Method
from espalier.methods.compressor import CacheCompressor

if TYPE_CHECKING:
    import pandas as pd

#: Keys of a command that a single run has no use for.
OF_COMMANDS = ("cluster", "curves", "grids", "json", "refused", "report")

#: Arguments of `apply` that have another place in the config.
PLACES = {
    **{name: f"engine.{name}" for name in setting_hints(EngineSpec)},
    "cache_ratio": "compressor.ratio",
    "draft": "method.draft",
    "variant": "method.variant",
    **{name: f"benchmark.{name}" for name in ("name", *setting_hints(RecordSettings))},
}

#: What `evaluate` takes, besides hyper-parameters.
ARGUMENTS = (*(key for key in RUN_KEYS if key not in OF_COMMANDS), *PLACES)

#: Keys of the sections of a method and a compressor that an instance of one leaves to its run.
BESIDE_OBJECTS = ("draft", "ratio")

#: Keys of sections, which a dotted key sets.
PARTS = {"model": tuple(setting_hints(ModelSpec)), "benchmark": tuple(setting_hints(BenchmarkSpec))}

#: What each place takes, in error lines.
MODELS = "a name of conf/model, or the result of espalier.load or espalier.wrap"
BENCHMARKS = (
    "a name of conf/benchmark, the path of own data, a pandas frame, or a list of dictionaries"
)


@dataclass(frozen=True)
class RunRequest:
    """A run as it is requested.

    Attributes:
        spec: the run.
        argv: the command line of its parts that have a name.
        method: the built method; None: by the name in `spec`.
    """

    spec: RunSpec
    argv: Sequence[str]
    method: Method | None


def read_request(
    model: str | PathLike[str] | Model,
    method: str | Method,
    benchmark: str | PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    unlimited: bool = False,
) -> RunRequest:
    """Return the run that `evaluate` has to do.

    Args:
        model: a name, or a model in memory.
        method: a name, or an instance.
        benchmark: a name, or records in memory.
        settings: by the names that `evaluate` takes; None leaves a setting to the config.
        unlimited: whether all samples are answered, beyond the benchmark's own limit.

    Raises:
        UserError: one line with the argument, its value and what is valid.
    """
    values = {name: value for name, value in settings.items() if value is not None}
    compressor = values.get("compressor")
    evicts = compressor not in (None, NO_COMPRESSOR)
    refuse("arguments", {"cache_ratio": values.get("cache_ratio"), "evicts": evicts})
    _refuse_settled(values, {"model": model, "method": method, "compressor": compressor})
    argv = [
        *_model_overrides(model),
        f"method={spelled(_method_name(method))}",
        *_benchmark_overrides(benchmark, values),
    ]
    if unlimited:
        argv.append("limit=null")
    argv += [
        f"{_key(name, value, method)}={spelled(value, name)}"
        for name, value in values.items()
        if name != "compressor" or isinstance(value, str)
    ]
    command = read_command(argv)
    cell = dict(command.cells[0])
    if isinstance(model, Model) and model.name is not None:
        cell["model"] = merged(cell["model"], model.settings)
    built = method if isinstance(method, Method) else None
    if built is not None:
        cell["method"] = _method_section(built, cell["method"])
    if compressor is not None and not isinstance(compressor, str):
        built = _with_compressor(cell, built, compressor)
    # A model without a file of conf/model states all of its settings.
    model_spec = model.spec if isinstance(model, Model) and model.name is None else None
    spec = build_spec(cell, model_spec, built)
    if isinstance(model, Model) and model.borrowed:
        spec = _in_memory(spec, model, built)
    return RunRequest(spec, command.argv, built)


def _refuse_settled(names: Iterable[str], objects: Mapping[str, Any]) -> None:
    """Raise UserError for a key of a section that an object in memory has settled."""
    for name in names:
        part, _, key = PLACES.get(name, name).partition(".")
        settled = isinstance(objects.get(part), Model | Method)
        if not settled or not key or key.startswith(BESIDE_OBJECTS):
            continue
        maker = "espalier.load or espalier.wrap" if part == "model" else "the call that made it"
        raise UserError(
            f"{name}: the {part} is an object with settings of its own; valid: without {name}, or "
            f"{key.rpartition('.')[2]} in {maker}"
        )


def _model_overrides(model: str | PathLike[str] | Model) -> list[str]:
    if isinstance(model, Model):
        # Expressions of a method's file may choose by the family.
        name = [] if model.name is None else [f"model={spelled(model.name)}"]
        return [*name, f"model.adapter={model.spec.adapter}"]
    if not isinstance(model, str | PathLike):
        raise _wrong_type("model", model, MODELS)
    return [f"model={spelled(model)}"]


def _benchmark_overrides(
    benchmark: str | PathLike[str] | pd.DataFrame | Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[str]:
    """Return what chooses a benchmark; records in memory are written to the cache, as a file of the user."""
    if isinstance(benchmark, PathLike) or (isinstance(benchmark, str) and is_data(benchmark)):
        return ["benchmark=data", f"benchmark.path={spelled(benchmark)}"]
    if isinstance(benchmark, str):
        return [f"benchmark={spelled(benchmark)}"]
    if isinstance(benchmark, bytes | Mapping) or not isinstance(benchmark, Iterable):
        raise _wrong_type("benchmark", benchmark, BENCHMARKS)
    values = {key: settings.get(key, default) for key, default in asdict(RecordSettings()).items()}
    records = read_section(RecordSettings, "benchmark", values)
    folder = save_records(benchmark, Path.cwd(), cache_folder() / "espalier" / "own", records)
    return ["benchmark=data", f"benchmark.path={spelled(folder)}"]


def _wrong_type(key: str, value: Any, valid: str) -> UserError:
    return UserError(f"{key} is a {type(value).__name__}; valid: {valid}")


def _method_name(method: str | Method) -> str:
    """Return the name of conf/method under which a method is composed; for a class without a file that of its kind."""
    if isinstance(method, str):
        return method
    check_instance(method, METHODS_TAKEN)
    return registered_name(type(method)) or ("vanilla_sd" if method.takes_draft else "none")


def registered_name(method_class: type[Method]) -> str | None:
    """Return the name of a method of the repository; None for a class of the caller's."""
    module = method_class.__module__.rpartition(".")[2]
    return module if module in METHODS and METHODS.load(module) is method_class else None


def _method_section(method: Method, composed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of an instance: of a method of the repository with its hyper-parameters."""
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


def _with_compressor(cell: dict[str, Any], built: Method | None, compressor: Any) -> Method:
    """Put the caller's compressor into a cell, and return the composition of both methods."""
    if not isinstance(compressor, CacheCompressor):
        raise _wrong_type("compressor", compressor, "a name, or an instance of a CacheCompressor")
    name = registered_name(type(compressor)) or type(compressor).__name__
    section, composed = cell["compressor"], cell["method"]
    cell["compressor"] = {**section, "name": name, "params": params_of(compressor)}
    if built is None:
        built = build_method(composed["name"], composed["params"], composed.get("code"))
    return stacked(built, compressor, section["ratio"], (composed["name"], name))


def _in_memory(spec: RunSpec, model: Model, method: Method | None) -> RunSpec:
    """Return the run with the digest of the caller's weights in the place of a checkpoint's."""
    built = method or build_method(spec.method.name, spec.method.params)
    refuse_calibrated(model.spec, built, spec.method.name)
    with model.open_adapter() as adapter:
        digest = weights_digest(adapter.model, adapter.processor)
    return replace(spec, model=replace(spec.model, in_memory=digest))


def _key(name: str, value: Any, method: str | Method) -> str:
    """Return the config key of an argument; what no other part of the config has is a hyper-parameter.

    Raises:
        UserError: it is neither.
    """
    if name in OF_COMMANDS:
        raise UserError(f"{name} is for commands of several runs; valid: without {name}")
    if "." in name or name in RUN_KEYS:
        return name
    if name in PLACES:
        return PLACES[name]
    if isinstance(method, Method):
        raise held_by_instance(name, value, method, ARGUMENTS)
    params = compose_section("method", method)["params"] or {}
    if name in params:
        return f"method.params.{name}"
    dotted = [f"**{{'{part}.{name}': {value!r}}}" for part, names in PARTS.items() if name in names]
    if dotted:
        raise UserError(f"{name}={value!r} is a key of a section; valid: {' or '.join(dotted)}")
    raise unknown_argument(name, value, method, params, ARGUMENTS)
