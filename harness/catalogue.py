"""All methods by name, and how one is built from the config. A new method is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from harness.errors import UserError, unknown_name
from harness.registry import Registry
from methods.base import Method, MethodError

METHODS = Registry("method")
METHODS.add("autoregressive", "methods.autoregressive:Autoregressive")
METHODS.add("cdpruner", "methods.cdpruner:CDPruner")
METHODS.add("d2pruner", "methods.d2pruner:D2Pruner")
METHODS.add("dart", "methods.dart:DART")
METHODS.add("divprune", "methods.divprune:DivPrune")
METHODS.add("dycoke", "methods.dycoke:DyCoke")
METHODS.add("fastervlm", "methods.fastervlm:FasterVLM")
METHODS.add("fastv", "methods.fastv:FastV")
METHODS.add("fitprune", "methods.fitprune:FitPrune")
METHODS.add("globalcom2", "methods.globalcom2:GlobalCom2")
METHODS.add("hired", "methods.hired:HiRED")
METHODS.add("ivtp", "methods.ivtp:IVTP")
METHODS.add("none", "methods.none:NoReduction")
METHODS.add("nuwa", "methods.nuwa:Nuwa")
METHODS.add("onsd", "methods.onsd:OnSD")
METHODS.add("parallelvlm", "methods.parallelvlm:ParallelVLM")
METHODS.add("pearl", "methods.pearl:PEARL")
METHODS.add("pooled", "methods.pooled:Pooled")
METHODS.add("prumerge", "methods.prumerge:PruMerge")
METHODS.add("pyramiddrop", "methods.pyramiddrop:PyramidDrop")
METHODS.add("random", "methods.random:Random")
METHODS.add("rtprune", "methods.rtprune:RTPrune")
METHODS.add("sd_tree", "methods.sd_tree:SDTree")
METHODS.add("sparsevlm", "methods.sparsevlm:SparseVLM")
METHODS.add("specvlm", "methods.specvlm:SpecVLM")
METHODS.add("specvlm_sd", "methods.specvlm_sd:SpecVLMSD")
METHODS.add("std", "methods.std:STD")
METHODS.add("tome", "methods.tome:ToMe")
METHODS.add("uniform", "methods.uniform:Uniform")
METHODS.add("uvprune", "methods.uvprune:UVPrune")
METHODS.add("vanilla_sd", "methods.vanilla_sd:VanillaSD")
METHODS.add("visionzip", "methods.visionzip:VisionZip")


def names_of(base: type[object]) -> tuple[str, ...]:
    """Return the names of the methods of one kind, in alphabetical order. Cost: imports all of them."""
    return tuple(name for name in METHODS.names() if issubclass(METHODS.load(name), base))


def build_method(name: str, params: Mapping[str, Any]) -> Method:
    """Return the method `name` with these hyper-parameters; those not given keep the paper's defaults.

    Raises:
        UserError: unknown method, unknown hyper-parameter, wrong type or out of range; one line with the config key
            `method.params.<key>`, the value and what is valid.
    """
    method = METHODS.load(name)
    hints = get_type_hints(method)
    types = {field.name: hints[field.name] for field in fields(method) if field.init}
    unknown = [key for key in params if key not in types]
    if unknown:
        raise _unknown_param(name, unknown[0], types)
    values = {
        key: typed(f"method.params.{key}", value, types[key]) for key, value in params.items()
    }
    try:
        built: Method = method(**values)
    except MethodError as error:
        raise UserError(str(error)) from error
    return built


def typed(key: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type; integers pass as floats, lists as tuples, nothing else is converted.

    Raises:
        UserError: the value is of another type; the line names the key and the type.
    """
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        item = get_args(hint)[0]
        return tuple(typed(f"{key}[{place}]", part, item) for place, part in enumerate(value))
    if not _is_of(value, hint):
        raise UserError(f"{key}={value!r} must be {_words(hint)}")
    return value


def _is_of(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is not None and origin is not tuple:  # a union such as int | None
        return any(_is_of(value, part) for part in get_args(hint))
    if isinstance(value, bool):  # True is an int for Python, but not for a reader of the config
        return hint is bool
    return origin is None and isinstance(value, hint)


def _words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        values = ", ".join(map(str, get_args(hint)))
        return values if len(get_args(hint)) == 1 else f"one of {values}"
    if origin is tuple:
        return f"a list, each item {_words(get_args(hint)[0])}"
    if origin is not None:
        return " or ".join(_words(part) for part in get_args(hint))
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string",
        NoneType: "null",
    }
    return names.get(hint, f"a {hint.__name__}")


def _unknown_param(name: str, key: str, types: Mapping[str, Any]) -> UserError:
    if not types:
        return UserError(f"method.params.{key} is unknown; method {name} has no hyper-parameters")
    return unknown_name("method.params", key, types)
