"""The benchmark of a run; one error line lists every mistake in its file before anything is loaded.

Keys of a benchmark on the user's own data that the config leaves open follow from the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.harness.errors import tell_once, unknown_name
from espalier.harness.settings import read_fields, read_section, read_value, setting_hints
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.generation import unescaped
from espalier.harness.specs.records.data_file import check_address
from espalier.harness.specs.records.record import RecordSettings, RecordTable, category_metric

#: The name in conf/benchmark, to which that of the data is appended.
NAME = "data"

#: Metrics by score, the headline first; other scores have an accuracy.
METRICS = {"anls": "anls", "none": "words"}


def is_own_data(part: Mapping[str, Any]) -> bool:
    """Return whether a section is that of own data: it has their settings."""
    return set(setting_hints(RecordSettings)) <= set(part)


def completed(part: Mapping[str, Any]) -> tuple[dict[str, Any], RecordSettings]:
    """Return the section with what follows from the records, and their settings; report a score that the data chose.

    Without `benchmark.path` there are no records, and the section is that of exact answers.

    Raises:
        UserError: one line with every mistake in settings, or the first mistakes in the data.
    """
    keys = setting_hints(RecordSettings)
    settings = read_section(RecordSettings, "benchmark", {key: part[key] for key in keys})
    section = {key: value for key, value in part.items() if key not in keys}
    check_address("benchmark.path", part["path"])
    path = None if part["path"] is None else read_value("benchmark.path", part["path"], Path)
    table = None
    if path is not None:
        # Imports numpy and Pillow.
        from espalier.harness.specs.records.own_data import read_records

        table = read_records(path, settings)
    settings = replace(settings, score=(table.score if table else settings.score) or "exact")
    computed = {"task": f"{NAME}_{settings.score}", **_metrics(str(settings.score), table)}
    section |= {key: value for key, value in computed.items() if section[key] is None}
    if table is not None:
        counts = {"samples": len(table.records), "video": table.has_video}
        section["dataset"] = {**section["dataset"], **counts}
        if section["name"] == NAME:
            section["name"] = f"{NAME}:{table.name}"
        if table.reason:
            tell_once(
                f"{section['name']}: {len(table.records)} records, benchmark.score={table.score}, "
                f"because {table.reason}"
            )
    return section, settings


def _metrics(score: str, table: RecordTable | None) -> dict[str, Any]:
    headline = METRICS.get(score, "accuracy")
    categories = () if table is None else table.categories
    metrics = [headline, *(category_metric(headline, category) for category in categories)]
    if score != "none":
        metrics.append("unparsed")
    return {"metrics": metrics, "headline": headline}


def benchmark_spec(part: Mapping[str, Any]) -> BenchmarkSpec:
    """Return the benchmark of a composed section, without a limit: that is the run's.

    Raises:
        UserError: one line with every key that is missing, unknown or wrong, its value and what is valid.
    """
    records = None
    if is_own_data(part):
        part, records = completed(part)
    values = read_fields(BenchmarkSpec, "benchmark", part, _unknown_metrics(part))
    values["title"] = values["title"] or values["name"]
    values["limit"] = None
    values["generation"] = unescaped(values["generation"])
    if values["new_tokens"] is not None:
        length = dict.fromkeys(("min_new_tokens", "max_new_tokens"), values["new_tokens"])
        values["generation"] = {**length, **values["generation"]}
    return BenchmarkSpec(**values, records=records)


def _unknown_metrics(part: Mapping[str, Any]) -> list[str]:
    """Return an error line for each key that names a metric which `benchmark.metrics` does not list."""
    metrics, reported = part.get("metrics"), part.get("reported")
    if not isinstance(metrics, list | tuple) or not all(isinstance(name, str) for name in metrics):
        return []  # The metrics themselves are wrong.
    names = [("headline", part["headline"])] if part.get("headline") else []
    if isinstance(reported, Mapping):
        names += [("reported", name) for name in reported]
    wrong = [(key, str(name)) for key, name in names if name not in metrics]
    return [str(unknown_name(f"benchmark.{key}", name, metrics)) for key, name in wrong]
