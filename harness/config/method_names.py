"""Names of methods on a command line: a file of conf/method, one of its variants, or a former name of a setting.

`fastv_paper` is `method=fastv method.variant=paper`; conf/method_names.yaml has the other former names. Read as plain
YAML: no Hydra, no torch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from omegaconf import Container, Node

from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.paths import CONF

GROUP = "method"
FORMER_NAMES = CONF / "method_names.yaml"


@dataclass(frozen=True)
class MethodName:
    """The setting that a name stands for.

    Attributes:
        method: a file of conf/method.
        variant: one of its variants; None: its default.
        params: hyper-parameters over those of the variant.
    """

    method: str
    variant: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    def overrides(self, key: str) -> str:
        """Return the setting as a command line has it, where `key` is `method` or `compressor`."""
        values = {"variant": self.variant} if self.variant else {}
        values |= {f"params.{name}": value for name, value in self.params.items()}
        return " ".join(
            [f"{key}={self.method}", *(f"{key}.{k}={_word(v)}" for k, v in values.items())]
        )


def former_name(name: str) -> MethodName | None:
    """Return the setting that a name other than a file of conf/method stands for; None: there is no such name."""
    if name in former_names():
        return former_names()[name]
    method, _, variant = name.rpartition("_")
    if (CONF / GROUP / f"{method}.yaml").is_file() and variant in variants(method):
        return MethodName(method, variant)
    return None


def variants(method: str) -> tuple[str, ...]:
    """Return the variants that the file of a method lists, the default first; none: it has one reading."""
    return tuple(read_choice(GROUP, method).get("variants", ()))


def setting_names() -> list[str]:
    """Return a name for each setting that has one: each variant of a method, and the former names."""
    return sorted({*_variant_names(), *former_names()})


def method_section(name: str) -> dict[str, Any]:
    """Return the section of conf/method that a name composes, `${}` unresolved."""
    former = former_name(name)
    if former is None or (CONF / GROUP / f"{name}.yaml").is_file():
        return read_choice(GROUP, name)
    section = read_choice(GROUP, former.method)
    section["variant"] = former.variant or section["variant"]
    section["params"] = {**section["params"], **former.params}
    return section


def of_variant(*, _parent_: Container, _node_: Node) -> Any:
    """Return the value of a hyper-parameter in the variant of its section: `${variant:}` in conf/method.

    Null if the section has no such variant, which `build_spec` refuses.
    """
    section: Any = _parent_._get_parent()
    values = section["variants"].get(section["variant"]) or {}
    return values.get(_node_._key())


def _variant_names() -> Iterator[str]:
    for method in choices(GROUP):
        readings = variants(method)
        yield from (f"{method}_{reading}" for reading in readings) if readings else (method,)


@lru_cache(maxsize=1)
def former_names() -> Mapping[str, MethodName]:
    """Return the former names that conf/method_names.yaml lists."""
    names = read_yaml(FORMER_NAMES)
    return {name: MethodName(**entry) for name, entry in names.items()}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
