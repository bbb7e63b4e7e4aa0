"""The benchmark of a run; one error line lists every mistake in its file before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from espalier.harness.config.cell_config import Cell
from espalier.harness.config.own_data_section import check_path, completed, is_own_data
from espalier.harness.errors import UserError
from espalier.harness.settings import choice, read_fields
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.generation import unescaped


def benchmark_spec(part: Mapping[str, Any], limit: int | None) -> BenchmarkSpec:
    """Return the benchmark of a composed section, with `limit` of the run.

    Raises:
        UserError: one line with every key that is missing, unknown or wrong, its value and what is valid.
    """
    records = None
    if is_own_data(part):
        part, records = completed(part)
    values = read_fields(BenchmarkSpec, "benchmark", part, _unknown_metrics(part))
    values["title"] = values["title"] or values["name"]
    values["limit"] = limit
    values["generation"] = unescaped(values["generation"])
    if values["new_tokens"] is not None:
        length = dict.fromkeys(("min_new_tokens", "max_new_tokens"), values["new_tokens"])
        values["generation"] = {**length, **values["generation"]}
    return BenchmarkSpec(**values, records=records)


def check_benchmarks(cells: Iterable[Cell]) -> None:
    """Check each distinct benchmark of the cells once.

    Raises:
        UserError: as `benchmark_spec`.
    """
    checked: list[Any] = []
    for cell in cells:
        part = cell.get("benchmark")
        if isinstance(part, dict) and not any(
            part is earlier or part == earlier for earlier in checked
        ):
            checked.append(part)
            check_path(part)
            benchmark_spec({str(key): value for key, value in part.items()}, None)


def _unknown_metrics(part: Mapping[str, Any]) -> list[str]:
    """Return an error line for each key that names a metric which `benchmark.metrics` does not list."""
    metrics, reported = part.get("metrics"), part.get("reported")
    if not isinstance(metrics, list | tuple) or not all(isinstance(name, str) for name in metrics):
        return []  # The metrics themselves are wrong.
    names = [("headline", part["headline"])] if part.get("headline") else []
    if isinstance(reported, Mapping):
        names += [("reported", name) for name in reported]
    lines = []
    for key, name in names:
        try:
            choice(f"benchmark.{key}", name, metrics)
        except UserError as error:
            lines.append(str(error))
    return lines
