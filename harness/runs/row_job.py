"""The job of a stored row, made again from the row alone: its cell, and the settings that differ from the config's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.harness.config.build_spec import build_spec
from espalier.harness.config.compose import read_command
from espalier.harness.config.group_lists import ConfFolders
from espalier.harness.config.overrides import spelled
from espalier.harness.errors import UserError
from espalier.harness.paths import CONF
from espalier.harness.runs.admission import Job, admit
from espalier.harness.specs.plugins.installed import conf_folders
from espalier.harness.store.files.digests import Digests

#: Blocks of a row's settings that decide how samples are answered. Those of a benchmark in `SCORED` do not.
ANSWERED = ("model", "method", "draft", "benchmark", "engine", "artifacts")
SCORED = ("files", "metrics", "headline", "higher_is_better", "derived", "answers", "intervals")

#: Settings that follow from others, or that a row has and no config key sets.
DERIVED = ("model.adapter", "model.revision", "model.facts", "draft", "artifacts")

#: A value that a block lacks.
_ABSENT = object()


def job_of_row(row: Mapping[str, Any], store: Path, overrides: Sequence[str] = ()) -> Job:
    """Return the job that answers samples as those of a row were answered.

    Args:
        row: as stored.
        store: where calibrations are searched first.
        overrides: of its command line that a row does not hold, such as `model.path=...`.

    Raises:
        UserError: a setting of the row cannot be made again; the line names it.
    """
    cell = _cell_overrides(row)
    job = _job([*cell, f"store={spelled(str(store))}", *overrides])
    settable = [
        f"{key}={spelled(value)}"
        for path, value in _differences(row["settings"], job.parts["settings"])
        if (key := _config_key(path, job)) is not None
    ]
    if settable:
        job = _job([*cell, *settable, f"store={spelled(str(store))}", *overrides])
    differences = [path for path, _ in _differences(row["settings"], job.parts["settings"])]
    if differences:
        raise UserError(
            f"run {row['run_key'][:12]} cannot be made again from its row: {', '.join(differences)} differ; "
            "valid: --set with the overrides of its command line, such as model.path=<folder>, or the files of then"
        )
    return job


def _job(overrides: Sequence[str]) -> Job:
    command = read_command(overrides)
    assert command is not None  # only options request information from Hydra
    (cell,) = command.cells
    return admit(replace(build_spec(cell), offline=True), Digests(), places=False)


def _cell_overrides(row: Mapping[str, Any]) -> list[str]:
    method, _, compressor = row["method"].partition("+")
    limit = row["settings"]["benchmark"]["limit"]
    return [
        f"model={row['model']}",
        f"benchmark={row['benchmark']}",
        f"method={_place(row, method)}",
        f"method.variant={row['variant']}",
        *([f"compressor={_place(row, compressor)}"] if compressor else []),
        f"ratio={row['ratio']}" if row.get("keep") is None else f"keep={row['keep']}",
        f"budget.rule={row['budget_rule']}",
        f"seed={row['seed']}",
        f"limit={spelled(limit)}",
    ]


def _place(row: Mapping[str, Any], name: str) -> str:
    """Return what chooses a method: its name, or the place of a user's class that no folder of configs names."""
    owners = ConfFolders((CONF, *conf_folders())).owners("method", name)
    places: Mapping[str, str] = row["extra"].get("code", {})
    return name if owners or name not in places else spelled(places[name])


def _differences(
    stored: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the stored value of each leaf that differs and decides how samples are answered."""
    for name in {**stored, **current}:
        path, value, now = f"{prefix}{name}", stored.get(name, _ABSENT), current.get(name, _ABSENT)
        counts = prefix or name in ANSWERED
        if not counts or value == now or (prefix == "benchmark." and name in SCORED):
            continue
        if isinstance(value, Mapping) and isinstance(now, Mapping):
            yield from _differences(value, now, f"{path}.")
        else:
            yield path, None if value is _ABSENT else value


def _config_key(path: str, job: Job) -> str | None:
    """Return the config key of a setting in a row; None if none sets it."""
    if path.startswith(DERIVED):
        return None
    if path == "benchmark.limit":
        return "limit"
    if path.startswith("method.params.") and len(job.method.parts) > 1:
        owner, _, name = path.removeprefix("method.params.").partition(".")
        if not name:
            return "compressor.ratio" if owner == "cache_ratio" else None
        first = type(job.method.parts[0]).__qualname__ == owner
        return f"{'method' if first else 'compressor'}.params.{name}"
    return path
