"""What a preset may say in place of a list of methods: `${methods:reducer}`, `${configs:decoder}`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from espalier.harness.config.by_benchmark import by_benchmark
from espalier.harness.config.by_kind import by_kind
from espalier.harness.config.method_names import former_name, of_variant, setting_names
from espalier.harness.errors import unknown_name

#: Kinds as presets call them: where each base is. The bases themselves bring in torch, seconds that a mistake on the
#: command line need not wait for, so they are imported where a preset uses one of the words.
KINDS = {
    "reducer": "espalier.methods.base:TokenReducer",
    "decoder": "espalier.methods.base:Decoder",
    "compressor": "espalier.methods.compressor:CacheCompressor",
}


def register() -> None:
    """Make these words known to OmegaConf, which Hydra resolves presets with; again does no harm.

    `methods` lists the methods of a kind, each with the config of its name; `configs` lists all config files of these
    methods. Names behind the kind are left out. Cost: where a preset uses one of them, all methods are imported.
    `by_kind` chooses a hyper-parameter by the kind of task, `by_benchmark` a setting by the benchmark, `variant` a
    hyper-parameter by the variant of its method.
    """
    words: dict[str, Callable[..., Any]] = {
        "methods": methods,
        "configs": configs,
        "by_benchmark": by_benchmark,
        "by_kind": by_kind,
        "variant": of_variant,
    }
    for word, answer in words.items():
        OmegaConf.register_new_resolver(word, answer, replace=True)


def methods(kind: str, *without: str) -> str:
    """Return the methods of a kind, separated by commas.

    Raises:
        UserError: there is no such kind.
    """
    # Brings in torch.
    from espalier.harness.specs.catalogue import names_of

    return ",".join(name for name in names_of(_base(kind)) if name not in without)


def configs(kind: str, *without: str) -> str:
    """Return the named settings of the methods of a kind, separated by commas: each variant, each former name.

    Raises:
        UserError: there is no such kind.
    """
    # Brings in torch.
    from espalier.harness.specs.catalogue import names_of

    wanted = names_of(_base(kind))
    names = (name for name in setting_names() if name not in without)
    return ",".join(name for name in names if _method_of(name) in wanted)


def _method_of(name: str) -> str:
    former = former_name(name)
    return name if former is None else former.method


def _base(kind: str) -> type[object]:
    if kind not in KINDS:
        raise unknown_name("hydra.sweeper.params.method: kind", kind, KINDS)
    module, _, name = KINDS[kind].partition(":")
    base: type[object] = getattr(import_module(module), name)
    return base
