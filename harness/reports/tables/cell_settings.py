"""Settings that a row must have to fill a cell: those that the row of the cell's run has, by its specs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache, lru_cache
from typing import Any

from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.group_lists import merged
from espalier.harness.config.lmms_task_files import read_yaml
from espalier.harness.config.method_names import method_kind
from espalier.harness.config.model_section import model_spec, with_question
from espalier.harness.paths import CONF
from espalier.harness.reports.tables.cell_runs import CellRun, choice, method_of
from espalier.harness.reports.tables.published_tables import FIRST
from espalier.harness.settings import OMITTED, default, marked, read_section
from espalier.harness.specs.benchmark_spec import BenchmarkSpec
from espalier.harness.specs.judge_spec import JudgeSpec
from espalier.harness.specs.row_settings import (
    IN_ROWS,
    LEFT_OPEN,
    SECTIONS,
    benchmark_settings,
    engine_settings,
    judge_settings,
    model_settings,
    plain,
)
from espalier.harness.specs.run_spec import ORIGINAL, TRANSFORMERS, EngineSpec, ModelSpec

#: Defaults of settings in rows, by dotted key.
DEFAULTS: Mapping[str, Any] = {
    **{
        f"{part}.{field.name}": plain(value)
        for part, section in SECTIONS.items()
        for field in fields(section)
        if field.name not in marked(section, OMITTED) and (value := default(field)) is not MISSING
    },
    **dict.fromkeys(("model.prompt", "draft.prompt"), ORIGINAL),
}

#: A commit of the hub.
COMMIT = re.compile(r"[0-9a-f]{40}")

#: Whether a denoising model caches its prompt; absent means false.
CACHED = "prefix_cache"


@dataclass(frozen=True)
class ComparedSettings:
    """The settings of a run that are compared with those of a row.

    Attributes:
        values: settings by dotted key; a table of a section is one value.
        stated: keys that the run sets itself: a row without them belongs to another run.
    """

    values: Mapping[str, Any]
    stated: frozenset[str]

    def difference(self, row_values: Mapping[str, Any]) -> str:
        """Return the first setting in which a row differs from the run, with both values; empty if there is none.

        Args:
            row_values: the row's settings (`row_settings`).
        """
        parts = {_part(key) for key in row_values}
        for key in {**self.values, **row_values}:
            if key not in self.stated and key in LEFT_OPEN:
                continue
            # A row without a judge or a draft has no settings of it.
            silent = key not in row_values and (key in IN_ROWS or _part(key) not in parts)
            if silent and key not in self.stated:
                continue
            usual = DEFAULTS.get(key)
            actual = row_values.get(key, None if key in IN_ROWS else usual)
            value = self.values.get(key, usual)
            if not _equal(actual, value) and not _is_unknown(key, actual, value):
                return f"{key}={actual}, not {value}"
        return ""


def row_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's settings in the form of `ComparedSettings.values`."""
    values: dict[str, Any] = {}
    for part, block in settings.items():
        if isinstance(block, Mapping):
            values |= {f"{part}.{name}": _plain(name, value) for name, value in block.items()}
        elif block:
            values[part] = block
    # Engine settings that do not apply to the method are null.
    values = {key: v for key, v in values.items() if v is not None or _part(key) != "engine"}
    params = values.pop("method.params")
    return {**values, **{f"method.params.{name}": value for name, value in params.items()}}


def compared_settings(run: CellRun) -> ComparedSettings:
    """Return the settings of a run that rows must match.

    Cost: some milliseconds for each run, once.
    """
    return _compared(tuple(run.overrides.items()))


@lru_cache(maxsize=8192)
def _compared(overrides: tuple[tuple[str, Any], ...]) -> ComparedSettings:
    run = CellRun(dict(overrides), "", 1.0)
    name, _, params = method_of(run)
    parts = _sections(run)
    benchmark = _benchmark(run.overrides["benchmark"], parts["benchmark"])
    target = (run.overrides["model"], parts["model"], (benchmark.kind, benchmark.name))
    model = _model(*target)
    blocks = {
        "model": _model_settings(*target),
        "benchmark": plain(
            benchmark_settings(with_question(benchmark, model.prompt), model, (), None)
        ),
        "engine": _engine(parts["engine"]),
        "judge": _judge(parts["judge"]),
        "backend": {"name": TRANSFORMERS},
        "method": {"params": params},
    }
    if method_kind(name) == "decoder":
        blocks["draft"] = _draft(parts["draft"], *target)
    values = row_settings(blocks)
    stated = {
        f"{part}.{key.partition('.')[0]}": value for part in parts for key, value in parts[part]
    }
    fixed = (key for key in values if _part(key) == "method")
    return ComparedSettings({**stated, **values}, frozenset((*stated, *fixed)))


#: Overrides of one section: key within it, and value.
_Overrides = tuple[tuple[str, Any], ...]


def _sections(run: CellRun) -> dict[str, _Overrides]:
    """Return a run's overrides by section, without those in `FIRST`."""
    parts: dict[str, list[tuple[str, Any]]] = {
        name: [] for name in ("model", "draft", "benchmark", "engine", "judge")
    }
    for key, value in run.overrides.items():
        key = "draft.name" if key == "method.draft" else key.lstrip("+")
        part, _, name = key.replace("method.draft_options.", "draft.").partition(".")
        if key not in FIRST and part in parts:
            parts[part].append((name, value))
    return {part: tuple(items) for part, items in parts.items()}


def _table(overrides: _Overrides) -> dict[str, Any]:
    """Return overrides as a table of tables."""
    table: dict[str, Any] = {}
    for key, value in overrides:
        for name in reversed(key.split(".")):
            value = {name: value}
        table = merged(table, value)
    return table


@cache
def _benchmark(name: str, overrides: _Overrides) -> BenchmarkSpec:
    return benchmark_spec(merged(choice("benchmark", name), _table(overrides)), None)


@cache
def _model(name: str, overrides: _Overrides, tasks: tuple[str, ...]) -> ModelSpec:
    return _spec(merged(choice("model", name), _table(overrides)), tasks)


@cache
def _model_settings(name: str, overrides: _Overrides, tasks: tuple[str, ...]) -> dict[str, Any]:
    return _settings(_model(name, overrides, tasks), _table(overrides))


@cache
def _draft(
    options: _Overrides, target_name: str, overrides: _Overrides, tasks: tuple[str, ...]
) -> dict[str, Any]:
    """Return the settings of the draft; it shares its target's inputs (harness/config/build_spec.py)."""
    target, table = _model(target_name, overrides, tasks), _table(options)
    name = table.pop("name", next(iter(target.drafts), None))
    if name is None:
        return {}
    section = {**choice("model", name), "video": asdict(target.video)}
    if section["adapter"] == target.adapter:
        section["processor"] = dict(target.processor)
    if section["prompts"].get(target.prompt.name) is not None:
        section["prompt"] = target.prompt.name
    return {"name": name, **_settings(_spec(merged(section, table), tasks), table)}


def _spec(section: Mapping[str, Any], tasks: tuple[str, ...]) -> ModelSpec:
    # The cards of this machine are no part of a cell.
    return model_spec({**section, "device": "cpu"}, tasks)


def _settings(model: ModelSpec, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model's row; without its files only a commit of the hub is known."""
    revision = None if model.path is not None else f"{model.hub}@{model.revision}"
    device = {key: value for key, value in overrides.items() if key == "device"}
    return {**plain(model_settings(model, revision, None)), **device}


@cache
def _engine(overrides: _Overrides) -> dict[str, Any]:
    section = merged(choice("engine", "default"), _table(overrides))
    return engine_settings(read_section(EngineSpec, "engine", section), {})


@cache
def _judge(overrides: _Overrides) -> dict[str, Any]:
    section = merged(read_yaml(CONF / "config.yaml")["judge"], _table(overrides))
    return dict(plain(judge_settings(read_section(JudgeSpec, "judge", section), None)))


def _part(key: str) -> str:
    return key.partition(".")[0]


def _plain(name: str, value: Any) -> Any:
    """Return a value without entries that equal their absence."""
    if name == "generation":
        return {
            key: entry
            for key, entry in value.items()
            if entry is not None and (key != CACHED or entry)
        }
    return value


def _is_unknown(key: str, actual: Any, expected: Any) -> bool:
    """Return whether two revisions cannot be compared: a folder's digest names no commit, and a branch none."""
    if not key.endswith(".revision"):
        return False
    (hub, *commit), (named_hub, *named) = (str(text).split("@") for text in (actual, expected))
    commits = [*commit, *named]
    if len(commits) < 2:
        return True
    return hub == named_hub and not all(map(COMMIT.fullmatch, commits))


def _equal(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Mapping):
        keys = {*expected, *(actual if isinstance(actual, Mapping) else ())}
        return isinstance(actual, Mapping) and all(
            _equal(actual.get(key), expected.get(key)) for key in keys
        )
    if isinstance(expected, float | int) and isinstance(actual, float | int):
        return abs(actual - expected) <= 1e-9
    return bool(actual == (list(expected) if isinstance(expected, tuple) else expected))
