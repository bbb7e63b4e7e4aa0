"""run.py on a real pseudo-terminal: what a person sees, how soon, and that programs still get their JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.terminal import Shown, on_terminal, screen

FEW = ("limit=2", "model.device=cpu", "engine.paired=0")
SWEEP = ("-m", "method=none,fastv", "ratio=0.5")


@pytest.fixture(scope="module")
def swept(store: Path) -> Shown:
    """A sweep of two cells on a terminal of 80 columns."""
    return on_terminal("run.py", f"store={store}", *FEW, *SWEEP)


@pytest.mark.slow
def test_a_sweep_shows_its_cell_one_line_each_and_what_is_left(swept: Shown, store: Path) -> None:
    assert swept.code == 0, swept.text
    assert max(map(len, swept.lines)) <= 80
    none, fastv = (line.split() for line in swept.lines[:2])
    assert (none[:2], fastv[:2]) == (["1/2", "done"], ["2/2", "done"])
    assert " ".join(none).endswith("n=2")
    assert " ".join(fastv[4:]).startswith("fastv official 0.5 seedling_rec acc_at_50 ")
    # What moved is gone, and was there.
    for passing in (
        "reading the command line",
        "composing cell 2 of 2",
        "checking cell 2 of 2",
        "loading seedling",
    ):
        assert passing in swept.raw
        assert passing not in swept.text
    assert "1 running" in swept.raw
    assert "1 running" not in swept.text


@pytest.mark.slow
def test_a_person_is_told_where_the_rows_are_and_what_comes_next(swept: Shown, store: Path) -> None:
    assert "{" not in swept.text
    (rows,) = (line for line in swept.raw.splitlines() if line.startswith("row: "))
    assert rows == f"row: {store}/runs/*/row.json"
    assert len(list(store.glob("runs/*/row.json"))) == 2
    (following,) = (line for line in swept.raw.splitlines() if line.startswith("next: "))
    # The floor that a reduction is read by is missing.
    assert " run.py -m " in following
    assert "method=none,random,fastv method.params.layer=0,2" in following


@pytest.mark.slow
def test_one_run_is_a_sheet_its_path_and_a_command(tmp_path: Path) -> None:
    shown = on_terminal("run.py", f"store={tmp_path}", *FEW, "method=fastv", "ratio=0.5")
    assert shown.code == 0, shown.text
    assert max(map(len, shown.lines)) <= 80
    (place,) = (line for line in shown.raw.splitlines() if line.startswith("row: "))
    row = json.loads(Path(place.removeprefix("row: ")).read_text(encoding="utf-8"))
    assert (row["method"], row["ratio"]) == ("fastv", 0.5)
    assert "method=none,random,fastv" in shown.raw
    assert "{" not in shown.text


@pytest.mark.slow
def test_json_is_printed_on_a_terminal_where_it_is_asked_for(swept: Shown, store: Path) -> None:
    shown = on_terminal("run.py", f"store={store}", *FEW, "method=none", "json=true")
    assert json.loads(shown.raw.splitlines()[-1])["status"] == "cached"
    assert "row: " not in shown.raw


@pytest.mark.slow
def test_a_program_gets_json_while_a_person_looks_on(
    swept: Shown, store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    on_terminal("run.py", f"store={store}", *FEW, *SWEEP, piped=out)
    assert "{" not in out.read_text()
    shown = on_terminal("run.py", f"store={store}", *FEW, *SWEEP, "json=true", piped=out)
    assert [line.split()[:2] for line in shown.lines[:2]] == [["1/2", "cached"], ["2/2", "cached"]]
    lines = out.read_text().splitlines()
    assert json.loads(lines[-1])["method"] == "fastv"
    assert sum(line.startswith("{") for line in lines) == 2
    assert "\x1b" not in out.read_text()
    assert not any("1/2" in line for line in lines)


def test_the_first_line_stands_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    shown = on_terminal("-X", "importtime", "run.py", f"store={tmp_path}", "ratio=1.5")
    assert shown.code == 2
    first = shown.raw.index("reading the command line")
    for heavy in (" hydra\r", " omegaconf\r"):
        assert first < shown.raw.index(heavy)
    assert " rich\r" not in shown.raw[:first]
    # A value that is wrong by itself is told without them.
    assert " torch\r" not in shown.raw
    assert " transformers\r" not in shown.raw


@pytest.mark.parametrize(
    ("line", "code"), [("ratio=1.5", 2), ("method=fastw", 2), ("--cfg job", 0)]
)
def test_the_first_byte_costs_less_than_a_second(tmp_path: Path, line: str, code: int) -> None:
    shown = on_terminal("run.py", f"store={tmp_path}", *line.split())
    assert shown.code == code
    assert 0 < shown.first < 1
    if code:
        (only,) = filter(None, shown.raw.replace("\r\x1b[K", "").splitlines()[-1:])
        assert only.startswith("error: ")
    assert not shown.lines[0].startswith("reading")


def test_the_screen_of_these_tests_does_what_a_terminal_does() -> None:
    assert screen("abc\rx\n", 80) == ["xbc", ""]
    assert screen("abc\r\x1b[Kd", 80) == ["d"]
    assert screen("one\r\ntwo\x1b[1A\r\x1b[2Kup", 80) == ["up", "two"]
    assert screen("\x1b[1mabcdef\x1b[0m", 4) == ["abcd", "ef"]
