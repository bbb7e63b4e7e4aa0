"""Settings that a row must have to fill a cell: those that the row of the cell's run has, by its specs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache, lru_cache
from typing import Any

from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.catalogue import Catalogue
from espalier.harness.config.composer import Composer, Piece, resolved
from espalier.harness.config.draft_section import build_draft
from espalier.harness.config.method_names import method_kind
from espalier.harness.config.model_section import model_spec, with_question
from espalier.harness.config.overrides import in_full, in_open_table
from espalier.harness.reports.tables.cell_runs import CellRun, method_of
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

#: Keys of overrides that change no setting but hyper-parameters.
AMOUNT = ("ratio", "budget")

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
        # Most are equal, and looking closer takes ten times as long.
        keys = [
            key
            for key in {**self.values, **row_values}
            if key not in row_values
            or key not in self.values
            or row_values[key] != self.values[key]
        ]
        for key in keys:
            if key not in self.stated and key in LEFT_OPEN:
                continue
            # A row without a judge or a draft has no settings of it.
            if key not in row_values and key not in self.stated:
                part = _part(key)
                if key in IN_ROWS or part not in map(_part, row_values):
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
    _, _, params = method_of(CellRun(dict(overrides), "", 1.0))
    fixed = {f"method.params.{name}": value for name, value in params.items()}
    composed = _composed(tuple(pair for pair in overrides if pair[0] not in AMOUNT))
    return ComparedSettings({**composed.values, **fixed}, composed.stated | fixed.keys())


@lru_cache(maxsize=8192)
def _composed(overrides: tuple[tuple[str, Any], ...]) -> ComparedSettings:
    """Return the settings of all runs that differ in their amount, without their hyper-parameters."""
    run = CellRun(dict(overrides), "", 1.0)
    pieces = _composer().pieces(in_open_table(in_full(text)) for text in run.line)
    benchmark = _benchmark(pieces["benchmark"])
    target = (pieces["model"], (benchmark.kind, benchmark.name))
    model = _model(*target)
    blocks = {
        "model": _model_settings(*target),
        "benchmark": plain(
            benchmark_settings(with_question(benchmark, model.prompt), model, (), None)
        ),
        "engine": _engine(pieces["engine"]),
        "judge": _judge(pieces["judge"]),
        "backend": {"name": TRANSFORMERS},
        "method": {"params": {}},
    }
    if method_kind(pieces["method"].written["name"]) == "decoder":
        blocks["draft"] = _draft(pieces["method"], *target)
    values, stated = row_settings(blocks), _stated(run)
    values |= {key: value for key, value in stated.items() if key.endswith(".device")}
    return ComparedSettings({**stated, **values}, frozenset(stated))


def _stated(run: CellRun) -> dict[str, Any]:
    """Return the settings that a run's overrides set, by their keys in rows, without those in `FIRST`."""
    stated = {}
    for key, value in run.overrides.items():
        key = "draft.name" if key == "method.draft" else key.lstrip("+")
        part, _, name = key.replace("method.draft_options.", "draft.").partition(".")
        if key not in FIRST and part in ("model", "draft", "benchmark", "engine", "judge"):
            stated[f"{part}.{name.partition('.')[0]}"] = value
    return stated


@cache
def _composer() -> Composer:
    return Composer(Catalogue())


@cache
def _benchmark(piece: Piece) -> BenchmarkSpec:
    return benchmark_spec(resolved({"benchmark": piece})["benchmark"])


@cache
def _model(piece: Piece, tasks: tuple[str, ...]) -> ModelSpec:
    # The cards of this machine are no part of a cell.
    return model_spec({**resolved({"model": piece})["model"], "device": "cpu"}, tasks)


@cache
def _model_settings(piece: Piece, tasks: tuple[str, ...]) -> dict[str, Any]:
    return _settings(_model(piece, tasks))


def _draft(method: Piece, model: Piece, tasks: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of the draft; none where neither the run nor its model names one."""
    section = method.written
    name = section.get("draft") or next(iter(_model(model, tasks).drafts), None)
    if name is None:
        return {}
    options = tuple((section.get("draft_options") or {}).items())
    return {"name": name, **_draft_settings(name, options, model, tasks)}


@cache
def _draft_settings(
    name: str, options: tuple[tuple[str, Any], ...], model: Piece, tasks: tuple[str, ...]
) -> dict[str, Any]:
    target, values = _model(model, tasks), {"device": "cpu", **dict(options)}
    return _settings(build_draft(name, values, target, tasks, _composer()))


def _settings(model: ModelSpec) -> dict[str, Any]:
    """Return the settings of a model's row; without its files only a commit of the hub is known."""
    revision = None if model.path is not None else f"{model.hub}@{model.revision}"
    return dict(plain(model_settings(model, revision, None)))


@cache
def _engine(piece: Piece) -> dict[str, Any]:
    return engine_settings(read_section(EngineSpec, "engine", piece.written), {})


@cache
def _judge(piece: Piece) -> dict[str, Any]:
    return dict(plain(judge_settings(read_section(JudgeSpec, "judge", piece.written), None)))


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
