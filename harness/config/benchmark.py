"""The benchmark of a run: every key of its file is checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness import fields
from harness.errors import UserError
from harness.paths import rooted
from harness.specs import (
    DERIVATIONS,
    NEEDS,
    PAPERS,
    TASK_KINDS,
    BenchmarkSpec,
    Cluster,
    DatasetSpec,
    Derived,
    Reported,
)

KEYS = (
    "name task title kind include_path sources dataset path limit metrics headline higher_is_better reported "
    "derived cluster blocks generation prompt text texts needs papers note"
)
DATASET = ("path", "config", "revision", "split", "samples", "licence")


def benchmark_spec(part: Mapping[str, Any], limit: Any) -> BenchmarkSpec:
    """Return the benchmark that a composed section describes, with the run's own limit.

    Raises:
        UserError: one line with the key, the value and what is valid.
    """
    fields.optional_integer("benchmark.limit", part["limit"], at_least=1)
    include_path = fields.optional_text("benchmark.include_path", part["include_path"])
    path = fields.optional_text("benchmark.path", part["path"])
    name = fields.text("benchmark.name", part["name"])
    metrics = fields.names("benchmark.metrics", part["metrics"])
    return BenchmarkSpec(
        name=name,
        task=fields.text("benchmark.task", part["task"]),
        include_path=None if include_path is None else rooted(include_path),
        limit=fields.optional_integer("limit", limit, at_least=1),
        metrics=metrics,
        headline=fields.choice("benchmark.headline", part["headline"], metrics),
        higher_is_better=fields.flag("benchmark.higher_is_better", part["higher_is_better"]),
        generation=fields.table("benchmark.generation", part["generation"]),
        sources=tuple(
            rooted(source)
            for source in fields.names("benchmark.sources", part["sources"], empty=True)
        ),
        title=fields.optional_text("benchmark.title", part["title"]) or name,
        kind=fields.choice("benchmark.kind", part["kind"], TASK_KINDS),
        dataset=_dataset(fields.table("benchmark.dataset", part["dataset"])),
        path=None if path is None else rooted(path),
        reported=_reported(fields.table("benchmark.reported", part["reported"]), metrics),
        prompt=fields.table("benchmark.prompt", part["prompt"]),
        text=fields.optional_text("benchmark.text", part["text"]),
        texts=_texts(fields.table("benchmark.texts", part["texts"])),
        needs=_some("benchmark.needs", part["needs"], NEEDS),
        papers=_some("benchmark.papers", part["papers"], PAPERS),
        note=fields.optional_text("benchmark.note", part["note"]),
        derived=_derived(fields.table("benchmark.derived", part["derived"])),
        cluster=_cluster(part["cluster"]),
        blocks=fields.optional_integer("benchmark.blocks", part["blocks"], at_least=0),
    )


def _dataset(part: dict[str, Any]) -> DatasetSpec:
    fields.only_known("benchmark.dataset", part, DATASET)
    samples = fields.optional_integer("benchmark.dataset.samples", part.pop("samples"), at_least=1)
    texts = {name: fields.optional_text(f"benchmark.dataset.{name}", part[name]) for name in part}
    return DatasetSpec(samples=samples, **texts)


def _reported(part: dict[str, Any], metrics: tuple[str, ...]) -> dict[str, Reported]:
    found = {}
    for metric, how in part.items():
        key = f"benchmark.reported.{metric}"
        fields.choice("benchmark.reported", metric, metrics)
        table = fields.table(key, how)
        fields.only_known(key, table, ("name", "scale"))
        name = fields.text(f"{key}.name", table["name"])
        found[metric] = Reported(name, fields.positive(f"{key}.scale", table["scale"]))
    return found


def _derived(part: dict[str, Any]) -> dict[str, Derived]:
    found = {}
    for name, how in part.items():
        key = f"benchmark.derived.{name}"
        table = fields.table(key, how)
        fields.only_some(key, table, DERIVATIONS)
        if len(table) != 1:
            raise UserError(f"{key}={how!r} must be one of {', '.join(DERIVATIONS)} with a list")
        ((word, members),) = table.items()
        found[name] = Derived(word, fields.names(f"{key}.{word}", members))
    return found


def _cluster(value: Any) -> Cluster | None:
    key = "benchmark.cluster"
    if value is None or isinstance(value, str):
        column = fields.optional_text(key, value)
        return None if column is None else Cluster(column)
    table = fields.table(key, value)
    fields.only_known(key, table, ("column", "modulo"))
    column = fields.text(f"{key}.column", table["column"])
    return Cluster(column, fields.integer(f"{key}.modulo", table["modulo"], at_least=2))


def _texts(part: dict[str, Any]) -> dict[str, str]:
    return {name: fields.text(f"benchmark.texts.{name}", value) for name, value in part.items()}


def _some(key: str, value: Any, valid: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(fields.choice(key, one, valid) for one in fields.names(key, value, empty=True))
