"""What a preset may say in place of a list of methods: `${methods:reducer}`, `${configs:decoder}`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf

from espalier.harness.config.by_benchmark import by_benchmark
from espalier.harness.config.by_kind import by_kind
from espalier.harness.errors import unknown_name
from espalier.harness.paths import ROOT

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
    `by_kind` chooses a hyper-parameter by the kind of task, `by_benchmark` a setting by the benchmark.
    """
    words: dict[str, Callable[..., Any]] = {
        "methods": methods,
        "configs": configs,
        "by_benchmark": by_benchmark,
        "by_kind": by_kind,
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
    """Return the files of conf/method whose method is of a kind, separated by commas.

    Raises:
        UserError: there is no such kind.
    """
    # Brings in torch.
    from espalier.harness.specs.catalogue import names_of

    wanted = names_of(_base(kind))
    files = sorted((ROOT / "conf" / "method").glob("*.yaml"))
    found = [path.stem for path in files if OmegaConf.load(path).name in wanted]
    return ",".join(name for name in found if name not in without)


def _base(kind: str) -> type[object]:
    if kind not in KINDS:
        raise unknown_name("hydra.sweeper.params.method: kind", kind, KINDS)
    module, _, name = KINDS[kind].partition(":")
    base: type[object] = getattr(import_module(module), name)
    return base
