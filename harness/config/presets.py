"""What a preset may say in place of a list of methods: `${methods:reducer}`, `${configs:decoder}`."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import OmegaConf

from harness.catalogue import METHODS, names_of
from harness.errors import unknown_name
from harness.paths import ROOT
from methods.base import Decoder, TokenReducer
from methods.compressor import CacheCompressor

#: Kinds as presets call them.
KINDS: dict[str, type[object]] = {
    "reducer": TokenReducer,
    "decoder": Decoder,
    "compressor": CacheCompressor,
}


def register() -> None:
    """Make both words known to OmegaConf, which Hydra resolves presets with; again does no harm.

    `methods` lists the methods of a kind, each with the config of its name; `configs` lists all config files of these
    methods. Names behind the kind are left out. Cost: where a preset uses one of them, all methods are imported.
    """
    words: dict[str, Callable[..., str]] = {"methods": methods, "configs": configs}
    for word, answer in words.items():
        OmegaConf.register_new_resolver(word, answer, replace=True)


def methods(kind: str, *without: str) -> str:
    """Return the methods of a kind, separated by commas.

    Raises:
        UserError: there is no such kind.
    """
    return ",".join(name for name in names_of(_base(kind)) if name not in without)


def configs(kind: str, *without: str) -> str:
    """Return the files of conf/method whose method is of a kind, separated by commas.

    Raises:
        UserError: there is no such kind.
    """
    base = _base(kind)
    found = []
    for path in sorted((ROOT / "conf" / "method").glob("*.yaml")):
        name = OmegaConf.load(path).name
        if path.stem not in without and name in METHODS and issubclass(METHODS.load(name), base):
            found.append(path.stem)
    return ",".join(found)


def _base(kind: str) -> type[object]:
    if kind not in KINDS:
        raise unknown_name("hydra.sweeper.params.method: kind", kind, KINDS)
    return KINDS[kind]
