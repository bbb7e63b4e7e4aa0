"""Queries of a store: lines of results and samples, and files of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from espalier.harness.errors import UserError
from espalier.harness.paths import ROOT
from espalier.harness.reports import results
from espalier.harness.store.exports import answer, write_tables
from espalier.harness.store.index import NAME
from tests.report.test_curves import add_run
from tests.store.test_upkeep import add, run_cli


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    for ratio, score in ((0.0, 0.9), (0.5, 0.8), (0.9, 0.45)):
        add_run(root, "none" if ratio == 0 else "fastv", ratio, score)
    return root


QUERY = "select method, ratio, score from results where headline order by ratio"
MEANS = "select run_key, metric, avg(score) from samples group by all order by all"


def test_lines_are_those_of_the_frames(store: Path, tmp_path: Path) -> None:
    write_tables(store, tmp_path / "tables")
    frame, scores = results.load(store), results.samples(store)
    expected = frame[frame.headline].sort_values("ratio")[["method", "ratio", "value"]]
    means = scores.groupby(["run_key", "metric"]).score.mean()
    for place in (store, tmp_path / "tables"):
        heading, *lines = answer(place, QUERY)
        assert heading == ("method", "ratio", "score")
        assert lines == list(expected.itertuples(index=False, name=None))
        _, *lines = answer(place, MEANS)
        assert [line[:2] for line in lines] == list(means.index)
        assert [line[2] for line in lines] == pytest.approx(list(means))


def test_further_settings_are_looked_up_in_json(store: Path) -> None:
    query = "select distinct settings->>'$.model.dtype' as dtype, extra->>'headline' from results"
    assert answer(store, query)[1:] == [("float32", "acc")]


@pytest.mark.parametrize("ending", ["csv", "json", "parquet"])
def test_answers_are_written_to_files(
    ending: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"it's.{ending}"
    code, out, _ = run_cli(capsys, "sql", QUERY, "--out", file, "--store", store)
    assert (code, out) == (0, [f"{file}: 3 lines"])
    with duckdb.connect() as connection:
        lines = connection.execute("select count(*), min(score) from query_table($1)", [str(file)])
        assert lines.fetchall() == [(3, 0.45)]


def test_answers_are_printed_in_columns(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "sql", f"{QUERY} limit 1", "--store", store)
    assert (code, out) == (0, ["method  ratio  score", "none    0.0    0.9"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("select foo from results",), 'Referenced column "foo" not found'),
        (("select * form results",), "syntax error at or near"),
        (("drop view results; select",), "sql='drop view results; select': Parser Error"),
        (("",), "sql='' gives no table; valid: select ... from results"),
        (("select 1", "--out", "answer.txt"), "must end in one of .csv, .json, .parquet"),
        (("select 1", "--out", "/dev/null/a.csv"), "--out: folder '/dev/null' cannot be written"),
        (("select 1", "--store", "nothing"), "--store='nothing' does not exist"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    arguments: tuple[str, ...], line: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_cli(capsys, "sql", "--store", store, *arguments)
    assert code == 2
    assert len(err) == 1
    assert line in err[0]


def test_a_query_changes_nothing(store: Path) -> None:
    expected = answer(store, QUERY)
    index = (store / NAME).read_bytes()
    with pytest.raises(UserError):
        answer(store, "delete from metrics; select * from nothing")
    assert (store / NAME).read_bytes() == index
    assert answer(store, QUERY) == expected


#: Rows that are added to a store, each answered by a query at once.
WRITER = """
import sys
from pathlib import Path
from espalier.harness.store.exports import answer
from tests.store.test_upkeep import add
store = Path(sys.argv[1])
for number in range(6):
    key = f"{sys.argv[2]}{number:02d}"
    add(store, key, [1.0, 0.0])
    assert (key,) in answer(store, "select run_key from results")
"""


@pytest.mark.slow
def test_readers_and_writers_at_once_see_whole_rows(tmp_path: Path) -> None:
    """Each renames a whole index into place: whoever comes last, nothing is missing."""
    store = tmp_path / "store"
    add(store, "first", [1.0])
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store), name], cwd=ROOT)
        for name in ("a", "b")
    ]
    while any(writer.poll() is None for writer in writers):
        lines = answer(store, "select run_key, count(*) from results group by all")
        assert ("first", 1) in lines
        assert {line[1] for line in lines[1:]} == {1}
    assert [writer.returncode for writer in writers] == [0, 0]
    assert answer(store, "select count(*) from results")[1:] == [(13,)]
    assert not [path for path in store.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_run_that_is_served_needs_no_index() -> None:
    """DuckDB is for overviews: neither the store nor a run imports it."""
    code = "import sys; import espalier.harness.cli.run, espalier.harness.runs.runner; print('duckdb' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert output.stdout.split() == ["False"], output.stderr
