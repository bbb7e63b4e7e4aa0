"""The tables of results: types that do not change, and rows that are named or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from espalier.harness.cli.store import main
from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import score_entries
from espalier.harness.paths import ROOT
from espalier.harness.reports import results
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.frame import POINTS, ROWS, SAMPLES
from espalier.harness.store import SCHEMA, Store
from espalier.harness.store.exports import read_scores, write_tables
from lab.pages import rows_page
from tests.pages.test_report import root
from tests.report.test_curves import add_run

__all__ = ["root"]

TYPES = {name: column.dtype for name, column in ROWS.items()}


def printed_errors(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_line_for_each_cell_and_metric_with_types_that_stay(root: Path) -> None:
    frame = results.load(root)
    assert len(frame) == 5
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == TYPES
    line = frame[(frame.curve == "clever") & (frame.ratio == 0.9)].iloc[0]
    assert (line.value, line.metric, line.headline) == (0.81, "acc", True)
    assert line.precision == "float32"
    assert pd.isna(line.stderr)
    # The same with what other rows lack: a column without a single value keeps its type.
    assert frame.device.isna().all()


@pytest.mark.parametrize("read", [results.load, results.samples, results.compare])
def test_a_frame_in_place_of_a_path_is_one_line(read: Callable[[Any], object], root: Path) -> None:
    with pytest.raises(UserError, match=r"^path=DataFrame must be the path of a run store"):
        read(results.load(root))


def test_scores_of_samples_have_their_metric_as_mean(root: Path) -> None:
    frame, rows = results.samples(root), results.load(root)
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == {
        name: kind for name, (kind, _) in SAMPLES.items()
    }
    means = frame.groupby("run_key").score.mean()
    assert means[rows.run_key].to_list() == pytest.approx(rows.value.to_list())


def test_points_are_those_of_the_report(root: Path) -> None:
    frame = results.compare(root)
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == {
        name: kind for name, (kind, _) in POINTS.items()
    }
    (panel,) = read_panels(root, ["boxes"])
    point = panel.points[panel.points.curve == "clever"].iloc[-1]
    line = frame[(frame.curve == "clever") & (frame.ratio == 0.9)].iloc[0]
    assert (line.retention_low, line.retention_high) == (point.retention.low, point.retention.high)
    assert line.gain_p < line.gain_p_holm == pytest.approx(2 * line.gain_p)
    assert set(frame[frame.curve == "none"].ratio) == {0.0}


def test_tables_say_what_the_store_says(root: Path, tmp_path: Path) -> None:
    assert main(["export", str(tmp_path / "small"), "--store", str(root)]) == 0
    pd.testing.assert_frame_equal(
        *(
            results.load(path).sort_values("run_key", ignore_index=True)
            for path in (root, tmp_path / "small")
        )
    )
    (panel,), (small,) = (read_panels(path, ["boxes"]) for path in (root, tmp_path / "small"))
    pd.testing.assert_frame_equal(panel.points, small.points)
    assert (panel.full, panel.headings) == (small.full, small.headings)


def test_units_outlive_the_tables(tmp_path: Path) -> None:
    run = Store(tmp_path).run("a")
    entries = score_entries({("t", i): {"acc": 1.0} for i in range(2)}, {("t", 1): {"acc": 0}})
    run.journal.append(*entries)
    run.commit(
        {"schema": 1, "run_key": "a", "model": "m", "method": "none", "benchmark": "b"}
        | {"ratio": 0.0, "n_samples": 2, "extra": {}}
    )
    write_tables(tmp_path, tmp_path / "small")
    stored_entries = read_scores(tmp_path / "small", ["a"])["a"]
    assert [entry["units"] for entry in stored_entries] == [{}, {"acc": 0}]


def test_what_is_passed_over_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_run(root, "clever", 0.9, 0.7, extra_code="later")  # the same cell, other code
    add_run(root, "clever", 0.75, 0.7, settings=None)
    path = next(root.glob("runs/boxes-clever--0.75*/row.json"))
    row = json.loads(path.read_text())
    del row["settings"]
    path.write_text(json.dumps(row))
    Store(root).run("begun").journal.append({"doc_id": 0})
    (Store(root).run("damaged").path / "row.json").write_text('{"schema": 1, "run')
    assert len(results.load(root)) == 5
    notes = printed_errors(capsys)
    for line in (
        "1 row passed over: without settings, from an older version",
        "1 row passed over: of other code, a newer one has their place",
        "2 rows passed over: not finished, or damaged",
        "damaged/row.json is damaged",
    ):
        assert line in notes


def test_nothing_is_read_from_damaged_tables(root: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    write_tables(root, small)
    whole = (small / "rows.parquet").read_bytes()
    (small / "rows.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is damaged"):
        results.load(small)
    rows = pd.read_parquet(_whole(small, whole))
    pd.concat([rows, rows[:1]]).to_parquet(small / "rows.parquet", index=False)
    with pytest.raises(UserError, match="is there twice"):
        results.load(small)
    rows["row"] = rows["row"].str.replace(f'"schema": {SCHEMA}', '"schema": 0')
    rows.to_parquet(small / "rows.parquet", index=False)
    with pytest.raises(UserError, match="has schema 0"):
        results.load(small)
    rows.rename(columns={"row": "line"}).to_parquet(small / "rows.parquet", index=False)
    with pytest.raises(UserError, match="has columns"):
        results.load(small)
    with pytest.raises(UserError, match="does not exist"):
        results.load(tmp_path / "nowhere")


def _whole(folder: Path, content: bytes) -> Path:
    (folder / "rows.parquet").write_bytes(content)
    return folder / "rows.parquet"


def test_the_page_has_the_columns_of_the_schema() -> None:
    text = (ROOT / "docs" / "rows.md").read_text(encoding="utf-8")
    assert rows_page.page() == text
    for name in ("run_key", "doc_id", "gain_p_holm"):
        assert text.count(f"\n| `{name}` | ") >= 1


def test_the_demo_rows_load(capsys: pytest.CaptureFixture[str]) -> None:
    rows, scores = results.load("results/demo"), results.samples("results/demo")
    assert rows.benchmark.nunique() >= 3
    assert {"none", "random", "fastv", "divprune"} <= set(rows.method)
    headline = rows[rows.headline].set_index("run_key")
    ours = scores[scores.run_key.isin(headline.index)]
    ours = ours[ours.metric == ours.run_key.map(headline.metric)]
    means = ours.groupby("run_key").score.mean()
    assert means[headline.index].to_list() == pytest.approx(headline.value.to_list())
    assert sum(path.stat().st_size for path in (ROOT / "results/demo").iterdir()) < 2_000_000
    assert "passed over" not in printed_errors(capsys)
