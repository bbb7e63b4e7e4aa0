"""What a row must look like to be one, as it was written: the file of a run is judged before anybody reads a number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espalier.harness.store.files.untrusted_json import read_json
from espalier.harness.store.schema import upgraded

#: What every row has, and what its blocks are; a file that differs is no row.
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
#: What is shown of a row that is served again: numbers, or null, of these names.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "tokens": ("visual", "requested_keep", "kept_final", "layer_average"),
    "flops": ("prefill_exact", "share_of_full"),
    "time": ("vision_ms", "select_ms", "prefill_ms", "decode_ms_per_token"),
    "memory": ("kv_bytes", "peak_bytes"),
}
#: What entries of a row are where they are there; `variant` is null of a few.
SOMETIMES: Mapping[str, type] = {
    **dict.fromkeys(("variant", "budget_rule", "status"), str),
    **{"settings": dict, "seed": int},
}
#: What entries of `extra` are where they are there, as far as overviews read them.
EXTRA: Mapping[str, type] = {
    **dict.fromkeys(("headline", "label"), str),
    **dict.fromkeys(("environment", "aggregation", "answers"), dict),
    "failures": list,
}


def read_row(path: Path) -> dict[str, Any]:
    """Return what a file holds if it has the shape of a row; raises ValueError with the reason if it has not."""
    row = read_json(path)
    if not isinstance(row, dict):
        raise ValueError("not a table")
    row = upgraded(row)
    check_shape(row)
    return row


def check_shape(row: Mapping[str, Any]) -> None:
    """Raise ValueError unless a row has what every row has, its blocks are tables, and what overviews read fits."""
    for name, kind in {**dict.fromkeys(set(BLOCKS) & set(row), dict), **SHAPE}.items():
        if not isinstance(row.get(name), kind) or isinstance(row[name], bool):
            raise ValueError(f"{name} is {row.get(name)!r}")
    for name, kind in SOMETIMES.items():
        if not isinstance(row.get(name), kind | None):
            raise ValueError(f"{name} is {row[name]!r}")
    if row["n_samples"] < 0:
        raise ValueError(f"n_samples is {row['n_samples']}")
    if not math.isfinite(row["ratio"]):
        raise ValueError(f"ratio is {row['ratio']}")
    for name, values in row.get("metrics", {}).items():
        if not isinstance(values, Mapping):
            raise ValueError(f"metrics.{name} is {values!r}")
        for part in ("value", "stderr"):
            _check_number(f"metrics.{name}.{part}", values.get(part))
    for name, parts in SHOWN.items():
        for part in parts:
            _check_number(f"{name}.{part}", row.get(name, {}).get(part))
    check_extra(row["extra"])


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise ValueError unless what is there of `extra` is of its kind, as far as overviews read it."""
    for name, kind in EXTRA.items():
        if not isinstance(extra.get(name), kind | None):
            raise ValueError(f"extra.{name} is {extra[name]!r}")
    for name, how in (extra.get("aggregation") or {}).items():
        if not isinstance(how, Mapping):
            raise ValueError(f"extra.aggregation.{name} is {how!r}")
    _check_number("extra.samples_per_second", extra.get("samples_per_second"))


def _check_number(place: str, value: Any) -> None:
    if not isinstance(value, int | float | None) or not math.isfinite(value or 0):
        raise ValueError(f"{place} is {value!r}")


def check_whole(row: Mapping[str, Any]) -> None:
    """Raise ValueError unless every number that is shown of a row is there."""
    metrics = row.get("metrics")
    if not metrics:
        raise ValueError(f"metrics is {metrics!r}")
    tables: dict[str, tuple[Any, tuple[str, ...]]] = {
        f"metrics.{name}": (values, ("value", "stderr")) for name, values in metrics.items()
    }
    tables |= {block: (row.get(block), names) for block, names in SHOWN.items()}
    for place, (values, names) in tables.items():
        if not isinstance(values, Mapping):
            raise ValueError(f"{place} is {values!r}")
        for name in names:
            if not isinstance(values.get(name, ""), int | float | None):
                raise ValueError(f"{place}.{name} is {values.get(name)!r}")
    # What is served again is printed as JSON.
    json.dumps(dict(row), allow_nan=False)
    if not isinstance(row["extra"].get("failures"), list):
        raise ValueError(f"extra.failures is {row['extra'].get('failures')!r}")
