"""The benchmark of a run: every mistake in its file is told at once, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from espalier.harness.config.cell_config import Cell
from espalier.harness.errors import UserError
from espalier.harness.paths import rooted
from espalier.harness.specs import value_checks as fields
from espalier.harness.specs.benchmark_spec import (
    ANSWER_FORMS,
    DERIVATIONS,
    NEEDS,
    PAPERS,
    TASK_KINDS,
    TASK_MEDIA,
    Answers,
    BenchmarkSpec,
    Cluster,
    DatasetSpec,
    Derived,
    Reported,
)

Reader = Callable[[str, Any], Any]


def benchmark_spec(part: Mapping[str, Any], limit: Any) -> BenchmarkSpec:
    """Return the benchmark that a composed section describes, with the run's own limit.

    Raises:
        UserError: one line with every key that is missing, unknown or wrong, its value and what is valid.
    """
    checks = _checks("benchmark", part, READERS)
    # Of metrics that are wrong themselves, no other key can be one.
    if "metrics" in part and isinstance(part["metrics"], list | tuple):
        checks["of metrics"] = lambda: _check_among(part, part["metrics"])
    found = fields.gather(checks, fields.key_mistakes("benchmark", part, READERS))
    found.pop("of metrics", None)
    found |= {
        "title": found["title"] or found["name"],
        "limit": fields.optional_integer("limit", limit, at_least=1),
    }
    if found["new_tokens"] is not None:
        exactly = dict.fromkeys(("min_new_tokens", "max_new_tokens"), found["new_tokens"])
        found["generation"] = {**exactly, **found["generation"]}
    return BenchmarkSpec(**found)


def check_benchmarks(cells: Iterable[Cell]) -> None:
    """Check the benchmark of each cell, each that differs once.

    Raises:
        UserError: as `benchmark_spec`.
    """
    seen: list[Any] = []
    for cell in cells:
        part = cell.get("benchmark")
        if isinstance(part, dict) and not any(part is one or part == one for one in seen):
            seen.append(part)
            benchmark_spec({str(key): value for key, value in part.items()}, None)


def _checks(
    prefix: str, part: Mapping[str, Any], readers: Mapping[str, Reader]
) -> dict[str, Callable[[], Any]]:
    """Return the check of every key that is there."""
    return {
        name: partial(read, f"{prefix}.{name}", part[name])
        for name, read in readers.items()
        if name in part
    }


def _table(prefix: str, value: Any, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return a table all of whose keys are there and right."""
    part = fields.table(prefix, value)
    return fields.gather(_checks(prefix, part, readers), fields.key_mistakes(prefix, part, readers))


def _check_among(part: Mapping[str, Any], metrics: Iterable[str]) -> None:
    """Raise unless what names a metric names one that the benchmark has."""
    named = {}
    if part.get("headline"):
        named["headline"] = part["headline"]
    reported = part.get("reported")
    if isinstance(reported, Mapping):
        named |= {f"reported.{one}": one for one in reported}
    fields.gather(
        {
            key: partial(fields.choice, f"benchmark.{key.partition('.')[0]}", one, metrics)
            for key, one in named.items()
        }
    )


def _path(key: str, value: Any) -> Path | None:
    text = fields.optional_text(key, value)
    return None if text is None else rooted(text)


def _paths(key: str, value: Any) -> tuple[Path, ...]:
    return tuple(rooted(source) for source in fields.names(key, value, empty=True))


def _some(valid: tuple[str, ...]) -> Reader:
    def read(key: str, value: Any) -> tuple[str, ...]:
        return tuple(fields.choice(key, one, valid) for one in fields.names(key, value, empty=True))

    return read


def _count(key: str, value: Any) -> int | None:
    return fields.optional_integer(key, value, at_least=1)


def _steps(key: str, value: Any) -> int | None:
    # The first token is the prefill's: a step makes the second.
    return fields.optional_integer(key, value, at_least=2)


def _media(key: str, value: Any) -> str:
    return fields.choice(key, value, TASK_MEDIA)


def _kind(key: str, value: Any) -> str:
    return fields.choice(key, value, TASK_KINDS)


def _dataset(key: str, value: Any) -> DatasetSpec:
    return DatasetSpec(**_table(key, value, DATASET))


def _reported(key: str, value: Any) -> dict[str, Reported]:
    part = fields.table(key, value)
    checks = {metric: partial(_how, f"{key}.{metric}", how) for metric, how in part.items()}
    return fields.gather(checks)


def _how(key: str, value: Any) -> Reported:
    return Reported(**_table(key, value, REPORTED))


def _derived(key: str, value: Any) -> dict[str, Derived]:
    part = fields.table(key, value)
    checks = {name: partial(_derivation, f"{key}.{name}", how) for name, how in part.items()}
    return fields.gather(checks)


def _derivation(key: str, value: Any) -> Derived:
    table = fields.table(key, value)
    fields.only_some(key, table, DERIVATIONS)
    if len(table) != 1:
        raise UserError(f"{key}={value!r} must be one of {', '.join(DERIVATIONS)} with a list")
    ((word, members),) = table.items()
    return Derived(word, fields.names(f"{key}.{word}", members))


def _answers(key: str, value: Any) -> Answers | None:
    return None if value is None else Answers(**_table(key, value, ANSWERS))


def _form(key: str, value: Any) -> str:
    return fields.choice(key, value, ANSWER_FORMS)


def _columns(key: str, value: Any) -> tuple[str, ...]:
    return tuple(fields.names(key, value, empty=True))


def _cluster(key: str, value: Any) -> Cluster | None:
    if value is None or isinstance(value, str):
        column = fields.optional_text(key, value)
        return None if column is None else Cluster(column)
    return Cluster(**_table(key, value, CLUSTER))


def _modulo(key: str, value: Any) -> int:
    return fields.integer(key, value, at_least=2)


def _blocks(key: str, value: Any) -> int | None:
    return fields.optional_integer(key, value, at_least=0)


def _texts(key: str, value: Any) -> dict[str, str]:
    part = fields.table(key, value)
    # Null takes back what another file says.
    checks = {
        name: partial(_text, f"{key}.{name}", one) for name, one in part.items() if one is not None
    }
    return fields.gather(checks)


def _optional_text(key: str, value: Any) -> str | None:
    return None if value is None else _text(key, value)


def _text(key: str, value: Any) -> str:
    text = fields.text(key, value)
    # Jinja takes a tenth of a second to import, and most runs have no text of their own.
    from espalier.harness.config.prompt_templates import checked

    return checked(key, text)


DATASET: dict[str, Reader] = {
    "path": fields.optional_text,
    "config": fields.optional_text,
    "revision": fields.optional_text,
    "split": fields.optional_text,
    "samples": _count,
    "video": fields.flag,
    "licence": fields.optional_text,
}

REPORTED: dict[str, Reader] = {"name": fields.text, "scale": fields.positive}

ANSWERS: dict[str, Reader] = {"form": _form, "options": _columns}

CLUSTER: dict[str, Reader] = {"column": fields.text, "modulo": _modulo}

#: Every key of a file, with what checks its value.
READERS: dict[str, Reader] = {
    "name": fields.text,
    "task": fields.text,
    "title": fields.optional_text,
    "kind": _kind,
    "include_path": _path,
    "sources": _paths,
    "dataset": _dataset,
    "media": _media,
    "path": _path,
    "limit": _count,
    "metrics": fields.names,
    "headline": fields.text,
    "higher_is_better": fields.flag,
    "reported": _reported,
    "derived": _derived,
    "answers": _answers,
    "cluster": _cluster,
    "blocks": _blocks,
    "generation": fields.table,
    "prompt_tokens": _count,
    "new_tokens": _steps,
    "prompt": fields.table,
    "text": _optional_text,
    "texts": _texts,
    "needs": _some(NEEDS),
    "papers": _some(PAPERS),
    "note": fields.optional_text,
}
