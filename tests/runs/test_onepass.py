"""Cells that share a pass give the rows of cells that ran one after the other, but for times; whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.config.build_spec import build_spec
from espalier.harness.engine.session import Session
from espalier.harness.evaluation.samples import SampleErrors
from espalier.harness.kinds.lookup import method_of
from espalier.harness.runs.model_pool import Pool
from espalier.harness.runs.onepass import why_not_shared
from espalier.harness.runs.runner import Runner
from espalier.harness.store.files.journal import Journal
from espalier.methods.base import MethodError
from tests import commands

#: Nothing to do, scores below its layer, choices before the decoder, entries that leave the cache.
METHODS = "none,fastv,divprune,snapkv"
SWEEP = (
    f"method={METHODS}",
    "ratio=0.5,0.9",
    "limit=7",
    "engine.batch_size=3",
    "engine.paired=0",
    "json=false",
)
SHARED = "engine.share=prefix"
CELLS = 7  # `none` has one ratio

#: What of a row is a time, or says where times come from; the environment names a commit, which may not stand still.
TIMES = {
    ("time",),
    ("extra", "time_iqr"),
    ("extra", "samples_per_second"),
    ("extra", "reading_ms"),
    ("extra", "one_pass"),
    ("extra", "peak_note"),
    ("memory", "peak_bytes"),
    ("extra", "environment"),
}
DRAWN = ("+benchmark.generation.do_sample=true", "+benchmark.generation.temperature=1.0")
POOL = Pool()


def sweep(
    store: Path,
    *overrides: str,
    arguments: Sequence[str] = SWEEP,
    failing: Callable[[Runner, Exception], None] | None = None,
) -> list[dict[str, Any]]:
    """Run a sweep as run.py does and return its rows."""
    cells = commands.cells_of("-m", *arguments, *overrides, f"store={store}")
    runner = Runner(sweep=True, pool=POOL)
    runner.admit([build_spec(cell) for cell in cells])
    for admitted in runner.admitted:
        try:
            runner.run(admitted)
        except (SampleErrors, MethodError) as error:
            if failing is None:
                raise
            failing(runner, error)
    return runner.rows


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without its times."""
    return {
        name: {key: entry for key, entry in value.items() if (name, key) not in TIMES}
        if isinstance(value, dict)
        else value
        for name, value in row.items()
        if (name,) not in TIMES
    }


def journals(store: Path) -> dict[str, list[Any]]:
    """Return what the journal of each run holds, times aside."""
    entries_by_run = {}
    for folder in sorted((store / "runs").iterdir()):
        entries = Journal(folder / "journal.jsonl").entries()
        for entry in entries:
            entry.get("record", {}).update(times_ms={}, shared=[])
        entries_by_run[folder.name] = entries
    return entries_by_run


@pytest.fixture(scope="module")
def separate_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose cells ran one after the other."""
    store = tmp_path_factory.mktemp("alone")
    sweep(store)
    return store


def rows_of(store: Path) -> dict[str, dict[str, Any]]:
    return {
        path.parent.name: json.loads(path.read_text()) for path in store.glob("runs/*/row.json")
    }


def agree(
    first: Path,
    second: Path,
    comparable: Callable[[Mapping[str, Any]], dict[str, Any]] = without_times,
) -> bool:
    """Return whether two stores hold the same rows and answers."""
    rows = [
        {key: comparable(row) for key, row in rows_of(store).items()} for store in (first, second)
    ]
    assert rows[0] == rows[1]
    return journals(first) == journals(second)


@pytest.mark.slow
def test_rows_are_those_of_cells_that_ran_alone(
    separate_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last batch is shorter; the same keys, answers, counts and scores, and no times."""
    rows = sweep(tmp_path, SHARED)
    assert len(rows_of(tmp_path)) == CELLS
    assert agree(separate_store, tmp_path)
    for row in rows:
        assert set(row["time"].values()) == {None}
        assert row["extra"]["time_iqr"] == {}
        assert row["memory"]["peak_bytes"] is None
        assert row["extra"]["samples_per_second"] is None
        assert row["extra"]["one_pass"]["samples"] == 7
    assert "7 cells of seedling on seedling_rec in one pass" in capsys.readouterr().err


def test_times_of_rows_that_ran_alone_are_served(tmp_path: Path) -> None:
    few = ("method=fastv,divprune", "ratio=0.5", "limit=2", *SWEEP[3:])
    sweep(tmp_path, arguments=few)
    rows = sweep(tmp_path, SHARED, arguments=few)
    assert {row["status"] for row in rows} == {"cached"}
    assert all(row["time"]["prefill_ms"] > 0 and "one_pass" not in row["extra"] for row in rows)


@pytest.mark.slow
def test_a_pass_that_was_stopped_goes_on(
    separate_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of a batch: some cells have it; only the others answer it."""
    original = Session.generate
    calls: list[tuple[str, ...]] = []

    def generate(self: Session, inputs: Any, samples: Any = None, **generation: Any) -> Any:
        if samples is not None:  # layers that are run for all ask nothing
            calls.append(tuple(samples))
            if len(calls) == CELLS + 3:
                raise KeyboardInterrupt
        return original(self, inputs, samples, **generation)

    monkeypatch.setattr(Session, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, SHARED)
    assert not rows_of(tmp_path)
    rows = sweep(tmp_path, SHARED)
    assert agree(separate_store, tmp_path, without_resumption)
    assert len(calls) - 1 == 3 * CELLS  # no batch twice, but for the one that was stopped
    resumed = {row["run_key"]: row["extra"]["resumed_samples"] for row in rows}
    assert sum(resumed.values()) == (CELLS + 2) * 3


def without_resumption(row: Mapping[str, Any]) -> dict[str, Any]:
    stripped = without_times(row)
    return {**stripped, "status": "", "extra": {**stripped["extra"], "resumed_samples": 0}}


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """DivPrune refuses one sample."""
    original = Session.generate

    def generate(self: Session, inputs: Any, samples: Any = None, **generation: Any) -> Any:
        refused = any(name.endswith("/4") for name in samples or ())
        if type(self.method).__name__ == "DivPrune" and refused:
            raise MethodError("no")
        return original(self, inputs, samples, **generation)

    monkeypatch.setattr(Session, "generate", generate)


@pytest.mark.slow
@pytest.mark.usefixtures("refusing")
def test_a_refusal_is_named_by_its_cell_and_spoils_no_other(
    separate_store: Path, tmp_path: Path
) -> None:
    errors: dict[str, list[str]] = {}
    for name in ("none", "prefix"):
        messages = errors.setdefault(name, [])
        sweep(
            tmp_path / name,
            f"engine.share={name}",
            failing=lambda runner, error, messages=messages: messages.append(str(error)),
        )
    assert errors["none"] == errors["prefix"]
    assert len(errors["prefix"]) == 2
    expected, rows = rows_of(separate_store), rows_of(tmp_path / "prefix")
    assert len(rows) == CELLS - 2
    assert {key: without_times(row) for key, row in rows.items()} == {
        key: without_times(expected[key]) for key in rows
    }


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("method=fastv", None),
        ("engine.batch_size=auto", "engine.batch_size=auto"),
        ("engine=emulate", "engine.backend=emulate"),
        ("engine.rescore=true", "engine.rescore=true"),
        ("method=vanilla_sd", "drafts"),
        ("method=ivtp", "inside the vision tower"),
        ("method=downsample", "changes the pictures"),
        ("method=snapkv", None),
    ],
)
def test_a_cell_outside_a_pass_has_a_reason(override: str, reason: str | None) -> None:
    spec = commands.spec_of("limit=2", override)
    answer = why_not_shared(spec, method_of(spec.method))
    assert (answer is None) if reason is None else (reason in (answer or ""))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("method=none,divprune", "compressor=snapkv,h2o", "compressor.ratio=0.5", "ratio=0.5"),
        ("method=random,fastv", "ratio=0.5,0.9", *DRAWN),
    ],
    ids=["reducer-and-compressor", "sampling"],
)
def test_cells_of_other_kinds_give_the_rows_of_cells_alone(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """What goes in front of the cache and what leaves it together; answers that are drawn, each from its own seed."""
    arguments = ("limit=5", "engine.batch_size=2", "engine.paired=0", "json=false", *overrides)
    plain, shared = tmp_path / "alone", tmp_path / "shared"
    sweep(plain, arguments=arguments)
    rows = sweep(shared, SHARED, arguments=arguments)
    assert len(rows) == 4
    assert all(row["extra"]["one_pass"]["samples"] == 5 for row in rows)
    assert agree(plain, shared)
