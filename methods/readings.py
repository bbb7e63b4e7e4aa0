"""The readings of each method: its variants and hyper-parameters in conf/method, from which every run takes them.

A method follows its paper (`paper`) or released code (`official`); where these differ it has both variants.
`method=NAME` runs the variant that the file names, which is `official` wherever released code is followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent.parent / "conf" / "method"

#: The default of a hyper-parameter that depends on the kind of task: `${by_kind:2, {localization: 5}}`.
_DEFAULT = re.compile(r"\$\{by_kind:([^,]+),")


@dataclass(frozen=True)
class Readings:
    """The readings of one method.

    Attributes:
        default: the variant that runs if none is named.
        params: all hyper-parameters in that variant, without a kind of task.
        variants: the hyper-parameters that each variant sets, the default first; empty with one reading.
    """

    default: str
    params: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@cache
def readings_of(name: str) -> Readings | None:
    """Return the readings of a method by its name; None if no file of conf/method has it. Cost: 1 ms, once."""
    path = FOLDER / f"{name}.yaml"
    if Path(name).name != name or not path.is_file():
        return None
    section = yaml.safe_load(path.read_text(encoding="utf-8"))
    variants = section.get("variants") or {}
    params = {key: _plain(value) for key, value in (section.get("params") or {}).items()}
    return Readings(section["variant"], params | variants.get(section["variant"], {}), variants)


def _plain(value: Any) -> Any:
    match = _DEFAULT.match(value) if isinstance(value, str) else None
    return value if match is None else yaml.safe_load(match[1])
