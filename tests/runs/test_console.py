"""The registry of names, the tables on the terminal, and a line a minute where there is none."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from espalier.harness.errors import UserError
from espalier.harness.runs import console
from espalier.harness.runs import progress_bar as progress
from espalier.harness.runs.progress_bar import Board, cell_progress, clock, tell_finished
from espalier.harness.specs.registry import Registry
from espalier.harness.store.row_text import FOOTNOTE, MARK, MEANS
from tests.runs.terminal import Terminal, screen


def test_registry_imports_a_module_only_when_its_name_is_loaded() -> None:
    table = Registry("colour")
    table.add("red", "this.module.does.not.exist:Red")
    table.add("blue", "colorsys:rgb_to_hsv")
    assert table.names() == ("blue", "red")
    assert "red" in table
    assert "green" not in table
    sys.modules.pop("colorsys", None)
    assert "blue" in table
    assert "colorsys" not in sys.modules
    assert table.load("blue")(0, 0, 0) == (0, 0, 0)
    with pytest.raises(ModuleNotFoundError):
        table.load("red")


def test_registry_names_the_key_and_refuses_a_second_entry() -> None:
    table = Registry("colour")
    table.add("red", "a:A")
    table.add("blue", "a:A")
    with pytest.raises(UserError, match=r"colour='rid' .*did you mean red\?.*valid: blue, red"):
        table.load("rid")
    with pytest.raises(ValueError, match="registered twice: a:A and b:B"):
        table.add("red", "b:B")


def row(method: str, key: str, **more: object) -> dict[str, object]:
    return {
        "model": "seedling",
        "method": method,
        "benchmark": "rec",
        "ratio": 0.5,
        "budget_rule": "kept",
        "run_key": key,
        "n_samples": 7,
        "status": "done",
        "metrics": {
            "other": {"value": 0.25, "stderr": None},
            "acc": {"value": 0.5, "stderr": 0.125},
        },
        "tokens": {"visual": 144, "requested_keep": 72, "kept_final": 72, "layer_average": 96},
        "flops": {"prefill_exact": 1e9, "share_of_full": 0.5},
        "time": {"vision_ms": 1, "select_ms": None, "prefill_ms": 3, "decode_ms_per_token": 4},
        "memory": {"kv_bytes": 2048, "peak_bytes": 3 * 2**20},
        "extra": {"headline": "acc", "label": "K=3", "speedup": None},
        **more,
    }


def test_table_has_one_line_for_each_run_with_its_headline() -> None:
    out = io.StringIO()
    rows = [row("none", "a"), row("none", "a", status="cached"), row("fastv", "b")]
    console.print_rows(rows, out, full=False)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("rec")]
    assert len(lines) == 2
    cells = "rec none K=3 0.5 acc 0.500 ± 0.125 7 72 50% 1.00 - 3.00 4.00 2 KiB done"
    assert " ".join(lines[0].split()) == cells
    assert "other" not in out.getvalue()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("width", [80, 180])
def test_a_score_of_unreadable_answers_is_marked(
    full: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "WIDTH", width)
    out = io.StringIO()
    extra = {"headline": "acc", "label": "", "speedup": None}
    rows = [row("fastv", "b", extra=extra | {"unparsed": unparsed}) for unparsed in (0, 1)]
    console.print_rows(rows[:1], out, full=full)
    assert MARK not in out.getvalue()
    console.print_rows(rows[1:], out, full=full)
    assert "0.500 ± 0.125‡" in out.getvalue()
    assert FOOTNOTE in out.getvalue()
    assert progress.score(rows[1]) == f"acc 0.500 ({MEANS})"


def sheet(**fields: object) -> str:
    """Return the sheet of one row."""
    out = io.StringIO()
    console.print_rows([row("fastv", "b", **fields)], out, full=True)
    return out.getvalue()


def speedup(pairs: int, ratio: float, ends: tuple[float | None, float | None], bound: float) -> str:
    """Return the sheet of a row with a measured speed-up of the prefill."""
    prefill = {"ratio": ratio, "low": ends[0], "high": ends[1], "bound": bound}
    block = {"pairs": pairs, "prefill": prefill, "above_bound": ratio > bound}
    return sheet(extra={"headline": "acc", "label": "", "speedup": block})


def test_sheet_shows_every_metric_headline_first_and_whether_a_speed_up_is_believable() -> None:
    text = speedup(4, 1.5, (1.25, 1.75), 2.0)
    assert text.index("acc 0.500 ± 0.125") < text.index("other 0.250")
    assert "144, asked to keep 72, kept 72, mean over layers 96" in text
    assert "prefill 1.50x [1.25, 1.75] in 4 pairs, 2.00x by FLOPs " in text
    assert "believable" not in text
    assert "\x1b" not in text
    above = "9.50x in 1 pairs, 3.60x by FLOPs; above the bound: not believable"
    assert above in speedup(1, 9.5, (None, None), 3.6)
    assert "acc undefined" in sheet(metrics={"acc": {"value": None, "stderr": None}})


def test_a_spread_is_named_on_every_sheet_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "acc 0.500 ± 0.125" in sheet()
    assert " ± standard error " in sheet()
    assert "standard error" not in sheet(metrics={"acc": {"value": 0.5, "stderr": None}})
    for width in (80, 180):
        monkeypatch.setattr(console, "WIDTH", width)
        out = io.StringIO()
        console.print_rows([row("fastv", "b")], out, full=False)
        assert "± standard error" in " ".join(out.getvalue().split())


def test_a_sheet_has_the_tokens_that_a_draft_sees() -> None:
    figures = ("gamma", "acceptance", "draft_visual", "tokens_per_target_forward", "mean_run")
    ends = {"mismatches": None, "degraded": {"answers": 0, "why": None}}
    block = dict(zip(figures, (5, 0.5, 14.4, 2, 1), strict=True)) | ends
    extra = {"headline": "acc", "label": "", "speedup": None}
    assert "draft sees     14.4 of 144 visual tokens" in sheet(extra=extra | {"speculative": block})
    plain = block | {"acceptance": None, "draft_visual": 0}
    assert "draft sees" not in sheet(extra=extra | {"speculative": plain})


def long_rows() -> list[dict[str, object]]:
    """A sweep with names as long as they come."""
    speculative = {
        **dict.fromkeys(("gamma", "draft_visual", "target_ms", "window_ms", "draft_ms"), 12345.67),
        **dict.fromkeys(("acceptance", "tokens_per_target_forward", "mean_run"), 0.987),
        "mismatches": {"answers": 12, "compared": 500},
    }
    extra = {"headline": "acc", "label": "K=3 layer=12 source=target", "speedup": None}
    drafted = extra | {"speculative": speculative}
    places = ("longvideobench_describe", "seedling_rec")
    return [
        row(method, f"{method}{place}", benchmark=place, extra=block)
        for place in places
        for method, block in (("sparsevlm_official_128", extra), ("parallelvlm", drafted))
    ]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_fit_the_terminal_and_lose_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console.print_rows(long_rows(), out, full=False)
    lines = screen(out.getvalue().replace("\n", "\r\n"), 1000)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for word in ("sparsevlm_official_128", "K=3", "layer=12", "source=target", "12345.67"):
        assert word in text
    for heading in ("FLOPs", "vision", "prefill", "KV", "T_p of a round", "per device", "differ"):
        assert heading in text
    assert text.count("12/500") == 2
    assert text.count("2 KiB") == 4


def test_where_there_is_no_terminal_the_width_does_not_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = []
    for width in ("80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        out = io.StringIO()
        console.print_rows(long_rows(), out, full=False)
        texts.append(out.getvalue())
    assert texts[0] == texts[1]
    assert max(map(len, texts[0].splitlines())) <= console.WIDTH


def test_progress_is_silent_for_a_minute_without_a_terminal() -> None:
    stream = io.StringIO()
    with cell_progress("run", Board(), stream=stream) as cell:
        cell.phase("loading")
        cell.samples(1, 2)
    tell_finished(row("fastv", "b"), Board(), 1.0, stream)
    assert stream.getvalue() == ""


def test_without_a_terminal_there_is_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 59.0, 60.0, 61.0, 119.0, 121.0, 122.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    stream = io.StringIO()
    with cell_progress("fastv 0.5 rec", Board(line_time=0.0), stream=stream) as cell:
        for finished in (1, 2, 3, 4):
            cell.samples(finished, 8)
    assert stream.getvalue() == (
        "fastv 0.5 rec: 2 of 8 samples, 3:03 left\nfastv 0.5 rec: 4 of 8 samples, 2:02 left\n"
    )


def test_in_a_sweep_the_minutes_and_the_counts_are_those_of_all_cells() -> None:
    stream, sweep = io.StringIO(), Board(3, {"a": "rec", "b": "rec"}, done=1)
    sweep.line_time -= progress.EVERY
    for key in ("a", "b"):
        with cell_progress(f"fastv {key}", sweep, key, stream) as cell:
            cell.samples(1, 2)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("fastv a: 1 of 2 samples; cells: 1 done, 1 running, 0 failed, 1 left")
    with cell_progress("other", Board(line_time=0.0), stream=stream, quiet=True) as cell:
        cell.samples(1, 2)
    assert "other" not in stream.getvalue()


def test_a_line_that_cannot_be_written_is_not_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with (
        suppress(OSError),  # of the stream's buffer, when it is closed
        Path("/dev/full").open("w", encoding="utf-8") as stream,
        cell_progress("run", Board(), stream=stream) as cell,
    ):
        for finished in range(5):
            cell.samples(finished, 8)
    assert finished == 4


@pytest.fixture
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("_wide")
def test_progress_draws_on_a_terminal() -> None:
    stream, sweep = Terminal(), Board(300, {"key": "rec"}, done=11)
    with cell_progress("fastv 0.5", sweep, "key", stream) as cell:
        cell.phase("loading seedling")
        cell.samples(1, 2)
        cell.samples(2, 2)
    text = stream.getvalue()
    for word in ("loading seedling", "fastv 0.5", "2/2", "11 done"):
        assert word in text
    assert not any(screen(text.replace("\n", "\r\n"), 80))


@pytest.mark.usefixtures("_wide")
def test_a_finished_cell_is_one_line_that_wraps_where_it_must() -> None:
    stream, sweep = Terminal(), Board(300, done=6, failed=1)
    tell_finished(row("fastv", "b"), sweep, 69.0, stream)
    tell_finished(long_rows()[0], sweep, 3700.0, stream)
    short, first, second = stream.getvalue().splitlines()
    assert short == "  7/300  done       1:09  fastv K=3 0.5 rec  acc 0.500  n=7"
    assert max(len(first), len(second)) <= 80
    assert second.startswith("         ")
    assert "1:01:40" in first


@pytest.mark.usefixtures("_wide")
def test_finished_cells_that_differ_in_their_prompt_have_different_names() -> None:
    stream, sweep = Terminal(), Board(300)
    for number, prompt in enumerate(({}, {"prompt": {"post_prompt": ""}}, {})):
        settings = {"model": {"conversation": None}, "benchmark": prompt}
        tell_finished(row("fastv", str(number), settings=settings), sweep, 1.0, stream)
    text = " ".join(stream.getvalue().split())
    assert text.count('fastv K=3 0.5 rec benchmark.prompt={"post_prompt": ""} acc') == 1
    assert text.count("fastv K=3 0.5 rec acc") == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1:00"), (69, "1:09"), (7269, "2:01:09")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert clock(seconds) == text
