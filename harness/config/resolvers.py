"""Expressions of the files in conf/, which Hydra resolves: `${methods:reducer}`, `${by_kind:2, {localization: 5}}`.

A value that a user sets replaces the expression, so a value on the command line always wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import Container, Node, OmegaConf

from espalier.harness.config.method_names import (
    KINDS,
    former_name,
    methods_of,
    setting_names,
)
from espalier.harness.errors import UserError, tell_once
from espalier.harness.settings import check_keys, choice
from espalier.harness.specs.benchmark_spec import TASK_KINDS


def register() -> None:
    """Register the expressions with OmegaConf; a second call changes nothing.

    `methods` lists the methods of a kind, each with the config of its name; `configs` lists all named settings of these
    methods. Names after the kind are left out.
    `by_kind` chooses a hyper-parameter by the kind of task, `by_benchmark` a setting by the benchmark, `variant` a
    hyper-parameter by the variant of its method.
    """
    resolvers: dict[str, Callable[..., Any]] = {
        "methods": methods,
        "configs": configs,
        "by_benchmark": by_benchmark,
        "by_kind": by_kind,
        "variant": of_variant,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def methods(kind: str, *excluded: str) -> str:
    """Return the methods of a kind, separated by commas.

    Raises:
        UserError: there is no such kind.
    """
    choice("hydra.sweeper.params.method: kind", kind, KINDS.values())
    return ",".join(name for name in methods_of(kind) if name not in excluded)


def configs(kind: str, *excluded: str) -> str:
    """Return the named settings of the methods of a kind, separated by commas: each variant, each former name.

    Raises:
        UserError: there is no such kind.
    """
    methods_of_kind = methods(kind).split(",")
    former_names = {name: former_name(name) for name in setting_names() if name not in excluded}
    by_name = {name: former.method if former else name for name, former in former_names.items()}
    return ",".join(name for name, method in by_name.items() if method in methods_of_kind)


def by_benchmark(values: Mapping[str, Any], *, _root_: Container) -> Any:
    """Return the value that a paper states for the run's benchmark: `${by_benchmark:{gqa: 16, llava_bench: 64}}`.

    Raises:
        UserError: `values` has none for it.
    """
    name = OmegaConf.select(_root_, "benchmark.name")
    if name not in values:
        raise UserError(
            f"benchmark={name!r} is none of those that this preset has a value for; valid: "
            f"{', '.join(values)}, or the setting itself on the command line"
        )
    return values[name]


def by_kind(default: Any, values: Mapping[str, Any], *, _root_: Container) -> Any:
    """Return the hyper-parameter for the run's kind of task, and report it on stderr if it is not the default.

    Args:
        default: for all kinds that `values` does not name, and where there is no benchmark.
        values: by `benchmark.kind`; a table instead of a value is by `model.adapter`, with `default` for others.

    Raises:
        UserError: `values` names a kind that does not exist.
    """
    check_keys("method.params: by_kind", values, TASK_KINDS)
    kind = OmegaConf.select(_root_, "benchmark.kind")
    value = values.get(kind, default)
    if isinstance(value, Mapping):
        value = value.get(OmegaConf.select(_root_, "model.adapter"), default)
    if value != default:
        method = OmegaConf.select(_root_, "method.name")
        benchmark = OmegaConf.select(_root_, "benchmark.name")
        tell_once(
            f"method={method}: {value} instead of {default}, as its paper has it for {kind} "
            f"(benchmark={benchmark}); extra.params of the row has what ran, method.params.<key> sets it"
        )
    return value


def of_variant(*, _parent_: Container, _node_: Node) -> Any:
    """Return the value of a hyper-parameter in the variant of its section: `${variant:}` in conf/method.

    Null if the section has no such variant, which `build_spec` refuses.
    """
    section: Any = _parent_._get_parent()
    values = section["variants"].get(section["variant"]) or {}
    return values.get(_node_._key())
