"""The section of a benchmark on the user's own data: keys that the config leaves open follow from the records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.harness.errors import UserError, tell_once
from espalier.harness.settings import read_section, read_value, setting_hints
from espalier.harness.specs.records.data_file import VALID, check_address
from espalier.harness.specs.records.own_data import read_records
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
    table = None if path is None else read_records(path, settings)
    settings = replace(settings, score=(table.score if table else settings.score) or "exact")
    computed = {"task": f"{NAME}_{settings.score}", **_metrics(str(settings.score), table)}
    section |= {key: value for key, value in computed.items() if section[key] is None}
    if table is not None:
        section["dataset"] = {
            **section["dataset"],
            "samples": len(table.records),
            "video": table.has_video,
        }
        if section["name"] == NAME:
            section["name"] = f"{NAME}:{table.name}"
        if table.reason:
            tell_once(
                f"{section['name']}: {len(table.records)} records, benchmark.score={table.score}, "
                f"because {table.reason}"
            )
    return section, settings


def check_path(part: Mapping[str, Any]) -> None:
    """Raise UserError if a section of own data names none."""
    if is_own_data(part) and part["path"] is None:
        raise UserError(f"benchmark.path=null: benchmark={part['name']} needs data; valid: {VALID}")


def _metrics(score: str, table: RecordTable | None) -> dict[str, Any]:
    headline = METRICS.get(score, "accuracy")
    categories = () if table is None else table.categories
    metrics = [headline, *(category_metric(headline, category) for category in categories)]
    if score != "none":
        metrics.append("unparsed")
    return {"metrics": metrics, "headline": headline}
