"""Names and kinds of methods on a command line: a file of conf/method, one of its variants, or a former name.

`fastv_paper` is `method=fastv method.variant=paper`; conf/method_names.yaml has the other former names. Read as plain
YAML, and kinds from the sources of `methods/`: no Hydra, no torch, no method is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.paths import CONF, ROOT
from espalier.harness.settings import PLUS
from espalier.harness.specs.run_spec import VARIANTS

GROUP = "method"
#: A hyper-parameter that each variant sets.
OF_VARIANT = "${variant:}"
FORMER_NAMES = CONF / "method_names.yaml"


#: The kind that each base class of methods makes (harness/kinds/lookup.py).
KINDS = {
    "TokenReducer": "reducer",
    "CacheCompressor": "compressor",
    "Decoder": "decoder",
    "DenoisingReducer": "denoiser",
}


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
    names = set(former_names())
    for method in choices(GROUP):
        names.update([f"{method}_{reading}" for reading in variants(method)] or [method])
    return sorted(names)


def method_section(name: str) -> dict[str, Any]:
    """Return the section of conf/method that a name composes, `${}` unresolved."""
    former = former_name(name)
    if former is None or (CONF / GROUP / f"{name}.yaml").is_file():
        return read_choice(GROUP, name)
    section = read_choice(GROUP, former.method)
    section["variant"] = former.variant or section["variant"]
    section["params"] = {**section["params"], **former.params}
    return section


def is_combination(name: str) -> bool:
    """Return whether a name is that of two methods of conf/method, with a plus between them."""
    names = name.split(PLUS)
    return len(names) == 2 and all(part in choices(GROUP) or former_name(part) for part in names)


def combination_section(name: str) -> dict[str, Any]:
    """Return the section of a combination: the hyper-parameters of each method below its name."""
    sections = [method_section(part) for part in name.split(PLUS)]
    params = {section["name"]: _variant_params(section) for section in sections}
    return {
        "name": PLUS.join(section["name"] for section in sections),
        "variant": VARIANTS[0],
        "params": {"first_ratio": None, **params},
    }


def _variant_params(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a section, with those of its variant in the place of `${variant:}`."""
    values = (section.get("variants") or {}).get(section["variant"]) or {}
    params = section["params"] or {}
    return {key: values[key] if value == OF_VARIANT else value for key, value in params.items()}


@lru_cache(maxsize=1)
def former_names() -> Mapping[str, MethodName]:
    """Return the former names that conf/method_names.yaml lists."""
    return {name: MethodName(**entry) for name, entry in read_yaml(FORMER_NAMES).items()}


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def methods_of(kind: str) -> list[str]:
    """Return the methods of a kind, each with the config of its name."""
    return [name for name in choices(GROUP) if method_kind(name) == kind]


def method_kind(name: str) -> str | None:
    """Return the kind of a method by the bases of its class; None: methods/ has no such file. Cost: milliseconds."""
    path = ROOT / "methods" / f"{name}.py"
    return _kind(path) if path.is_file() else None


@cache
def _kind(path: Path, name: str | None = None) -> str | None:
    """Return the kind of a class of a file, None: of the first class that has one."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    modules = {
        alias.name: node.module
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    bases = (
        base.id
        for node in classes.values()
        if name in (None, node.name)
        for base in node.bases
        if isinstance(base, ast.Name)
    )
    for base in bases:
        if base in KINDS:
            return KINDS[base]
        module = modules.get(base, "").removeprefix("espalier.")
        file = ROOT.joinpath(*module.split(".")).with_suffix(".py") if module else path
        kind = _kind(file, base) if base in classes or module.startswith("methods.") else None
        if kind is not None:
            return kind
    return None
