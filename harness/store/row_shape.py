"""The shape that a stored row must have; a run's file is checked before any number is read from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from espalier.harness.store.files.digests import read_json
from espalier.harness.store.schema import upgraded

#: Bytes that the file of a row may have; reading one takes several times as much memory.
LARGEST = 64 * 2**20

#: Entries that every row has, with their types.
SHAPE: Mapping[str, type | tuple[type, ...]] = {
    "run_key": str,
    "model": str,
    "method": str,
    "benchmark": str,
    "ratio": (int, float),
    "n_samples": int,
    "extra": dict,
}
BLOCKS = ("metrics", "tokens", "flops", "time", "memory")
#: Entries that are shown of a cached row: numbers or null.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "tokens": ("visual", "requested_keep", "kept_final", "layer_average"),
    "flops": ("prefill_exact", "share_of_full"),
    "time": ("vision_ms", "select_ms", "prefill_ms", "decode_ms_per_token"),
    "memory": ("kv_bytes", "peak_bytes"),
}
#: Types of optional entries; `variant` may be null.
OPTIONAL: Mapping[str, type] = {
    **dict.fromkeys(("variant", "budget_rule", "status"), str),
    **{"settings": dict, "seed": int, "keep": int},
}
#: Types of optional entries of `extra` that overviews read.
OPTIONAL_EXTRA: Mapping[str, type] = {
    **dict.fromkeys(("headline", "label"), str),
    **dict.fromkeys(("environment", "aggregation", "answers"), dict),
    "failures": list,
}


def read_row(path: Path) -> dict[str, Any]:
    """Return the row in a file; raises ValueError with the reason if the content does not have the shape of a row."""
    row = read_json(path, LARGEST)
    if not isinstance(row, dict):
        raise ValueError("not a table")
    row = upgraded(row)
    check_shape(row)
    return row


def check_shape(row: Mapping[str, Any]) -> None:
    """Raise ValueError unless a row has all required entries, its blocks are tables, and entries of overviews fit."""
    for name, kind in {**dict.fromkeys(set(BLOCKS) & set(row), dict), **SHAPE}.items():
        if not isinstance(row.get(name), kind) or isinstance(row[name], bool):
            raise ValueError(f"{name} is {row.get(name)!r}")
    _check_optional("", row, OPTIONAL)
    if row["n_samples"] < 0:
        raise ValueError(f"n_samples is {row['n_samples']}")
    if not math.isfinite(row["ratio"]):
        raise ValueError(f"ratio is {row['ratio']}")
    for name, values in row.get("metrics", {}).items():
        if not isinstance(values, dict):
            raise ValueError(f"metrics.{name} is {values!r}")
        _check_numbers(f"metrics.{name}.", values, ("value", "stderr"))
    for name, parts in SHOWN.items():
        _check_numbers(f"{name}.", row.get(name, {}), parts)
    _check_optional("extra.", row["extra"], OPTIONAL_EXTRA)
    for name, entry in (row["extra"].get("aggregation") or {}).items():
        if not isinstance(entry, dict):
            raise ValueError(f"extra.aggregation.{name} is {entry!r}")
    _check_numbers("extra.", row["extra"], ("samples_per_second",))


def _check_optional(place: str, table: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        value = table.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{place}{name} is {value!r}")


def _check_numbers(place: str, table: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        value = table.get(name)
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise ValueError(f"{place}{name} is {value!r}")


def check_complete(row: Mapping[str, Any]) -> None:
    """Raise ValueError unless every number that is shown of a row is present."""
    if not row.get("metrics"):
        raise ValueError(f"metrics is {row.get('metrics')!r}")
    # Their values are numbers already, or `check_shape` had refused the row.
    numbers: dict[str, tuple[Any, tuple[str, ...]]] = {
        f"metrics.{name}": (values, ("value", "stderr")) for name, values in row["metrics"].items()
    }
    numbers |= {name: (row.get(name), parts) for name, parts in SHOWN.items()}
    for place, (values, names) in numbers.items():
        if values is None:
            raise ValueError(f"{place} is None")
        for name in names:
            if name not in values:
                raise ValueError(f"{place}.{name} is None")
    # A cached row is printed as JSON.
    json.dumps(dict(row), allow_nan=False)
    if not isinstance(row["extra"].get("failures"), list):
        raise ValueError(f"extra.failures is {row['extra'].get('failures')!r}")
