"""The serving benchmark: loads, figures of a load, and the sentence about a method."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from espalier.harness.errors import UserError
from espalier.harness.runs.served import backend_check
from espalier.harness.stats import Interval
from espalier.serve.load import Load
from lab.bench import serve_bench
from lab.bench.serve_bench import (
    Loads,
    factor,
    goodput,
    load_name,
    main,
    page,
    sentence,
    summary,
    write,
)
from lab.pages.serve_page import MEASURED


def reply(*first: float, tokens: int = 3, seconds: float = 2.0) -> dict:
    requests = [
        {"first": wait, "end": wait + 0.2, "gaps": [0.1] * (tokens - 1), "prompt": 45}
        for wait in first
    ]
    blocks = {"mean": 2.5, "peak": 4.0}
    timed = {"seconds": seconds, "encoder": 0.4, "selection": 0.1}
    return {"requests": requests, "blocks": blocks, **timed}


def rows(lives: int = 3) -> pd.DataFrame:
    """Times of which the method's are a half alone and all under load; it is in time at one rate more."""
    entries = []
    for life in range(lives):
        for method, alone, late in (("none", 0.4, 0.9), ("divprune", 0.2, 0.3)):
            for load, wait in (
                ({"in_flight": 1}, alone + 0.01 * life),
                ({"in_flight": 16}, 0.8),
                ({"rate": 2.0}, 0.3),
                ({"rate": 4.0}, late),
            ):
                head = {"model": "m", "method": method, "ratio": 0.75, "life": life}
                head |= {"in_flight": None, "rate": None, **load}
                entries.append({**head, **summary(reply(wait, wait), 45, 0.5)})
    return pd.DataFrame(entries)


def test_figures_of_a_load():
    figures = summary(reply(0.1, 0.3, 0.6, 0.6), 45, 0.5)
    assert {name: figures[name] for name in ("first_ms", "gap_ms", "end_ms")} == pytest.approx(
        {"first_ms": 450, "gap_ms": 100, "end_ms": 650}
    )
    exact = {
        **{"requests_per_second": 2, "tokens_per_second": 6, "encoder_ms": 100},
        **{"selection_ms": 25, "in_time": 0.5, "blocks_peak": 4},
    }
    assert {name: figures[name] for name in exact} == exact
    assert summary({**reply(0.1), "selection": None}, 45, None)["selection_ms"] is None
    with pytest.raises(UserError, match=r"read prompts of \{45\} tokens; expected: 46"):
        summary(reply(0.1), 46, None)


def test_the_sentence_is_that_of_the_rows(tmp_path: Path):
    text = sentence(rows(), "divprune")
    assert text == (
        "`divprune` at 0.75 (prompts of 45 and 45 tokens), 2 requests with 1 in flight and a burst of 2: "
        "first token 1.95x [1.84, 2.07] and 1.00x [1.00, 1.00], "
        "whole answer 1.49x [1.46, 1.52] and 1.00x [1.00, 1.00], "
        "requests a second 1.00x [1.00, 1.00] and 1.00x [1.00, 1.00]; "
        "choosing takes 25 % of the encoder's time; "
        "goodput within 500 ms: at least 4.00 against 2.00 requests a second."
    )
    assert goodput(rows(), "none") == "2.00"
    lines = write(rows(), tmp_path / "deep" / "serve_m", "a device")
    # Two requests have no 99th percentile.
    assert any(line.startswith("| 2.00 a second | `none` | 300 | - | 100.0 |") for line in lines)
    assert lines[0].startswith("m in vLLM on a device, 3 engine lives")
    title, *_, last = page(rows().assign(frames=8, selection_ms=None), "a device")
    assert title.startswith("m, videos of 8 frames, in vLLM on")
    assert last.endswith("| - |")
    written = {path.suffix for path in (tmp_path / "deep").iterdir()}
    assert written == {".csv", ".md", ".png", ".svg"}


def loads(in_flight: int, requests: int) -> pd.DataFrame:
    return pd.DataFrame({"in_flight": [in_flight], "requests": [requests]})


@pytest.mark.parametrize(
    ("words", "figures", "text"),
    [
        (factor, Interval(1.29, 1.0178, 1.633), "1.29x [1.02, 1.63]"),
        (factor, Interval(1.23, 0.9971, 1.5), "1.23x [1.00, 1.50]"),
        (factor, Interval(1.25, math.nan, math.nan), "1.25x"),
        (load_name, loads(64, 64), "a burst of 64"),
        (load_name, loads(16, 32), "32 requests with 16 in flight"),
        (load_name, loads(1, 32), "32 requests with 1 in flight"),
    ],
)
def test_figures_in_words(words: Callable[[Any], str], figures: Any, text: str) -> None:
    assert words(figures) == text


def test_what_gets_worse_is_in_the_sentence() -> None:
    slower = rows()
    slower.loc[(slower.method == "divprune") & (slower.in_flight == 16), "end_ms"] *= 1.5
    assert "; slower than unpruned: whole answer, a burst of 2; " in sentence(slower, "divprune")


def test_a_single_life_has_no_intervals_and_no_rate_of_zero() -> None:
    single = rows(1)
    late = single.assign(in_time=0.5)
    assert "interval" not in page(single, "a device")[0]
    assert ", 1 engine life of each, " in page(single, "a device")[0]
    assert "[" not in sentence(single, "divprune")
    assert sentence(late, "divprune").endswith("below 2.00 against below 2.00 requests a second.")
    some = rows(2)
    some.loc[(some.life == 1) & some.rate.notna(), "in_time"] = 0.5
    assert goodput(some, "none") == "below 2.00 to 2.00"


def test_many_requests_have_a_99th_percentile() -> None:
    for number, cell in ((99, "-"), (100, "900")):
        entries = page(rows().assign(requests=number), "a device")
        (line,) = (line for line in entries if line.startswith("| 4.00 a second | `none`"))
        assert line.split(" | ")[3] == cell


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_pages_are_those_of_their_rows(path: Path) -> None:
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    device = text.split(" on ", 1)[1].split(", ", 1)[0]
    assert text == "\n".join(page(pd.read_csv(path), device)) + "\n"


def test_rates_follow_from_the_first_unpruned_life():
    loads = Loads((1, 64), (0.5, 2.0), requests=8, tokens=4)
    assert [load["requests"] for load in loads.closed()] == [8, 64]
    for seconds in (2.0, 1.0):  # a later life changes nothing
        many = {"in_flight": 64, **summary(reply(0.5, 0.5, seconds=4), 45, None)}
        few = {"in_flight": 1, **summary(reply(0.1, 0.1, seconds=seconds), 45, None)}
        loads.settle([many, few])
    assert (loads.rates, loads.limit) == ([0.5, 2.0], pytest.approx(0.4))


def test_arrivals_and_pictures_are_those_of_the_numbers():
    times = Load([1], edge=48, first=7, requests=200, tokens=1, rate=4.0).arrivals()
    assert times == sorted(times) == Load([1], 48, 7, 200, 1, rate=4.0).arrivals()
    assert times[-1] == pytest.approx(50, rel=0.3)
    pictures = [item["image"].tobytes() for item in Load([1], 48, 0, 9, 1, 1).media()]
    assert len(set(pictures)) == 9
    times = {"frames_indices": [0, 1, 2]}
    ((video, metadata),) = next(Load([1], 48, 0, 1, 1, 1, video=times).media())["video"]
    assert (video.shape, metadata) == ((3, 48, 48, 3), times)
    assert len({frame.tobytes() for frame in video}) == 3


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("method=fastv",), "it acts before decoder layer 2"),
        (("method=none", "ratio=0"), "method='none' is always measured"),
        (("-m", "model=seedling,seedling_video", "method=random"), "loads one model"),
        (("model=qwen3_vl_2b", "method=evs"), "method='evs' compares frames; valid: --frames="),
        (("ratio=1", "method=random"), "ratio=1 must be a number in [0, 1)"),
    ],
)
def test_bad_input_is_one_line(argv, line, monkeypatch, capsys):
    monkeypatch.setattr(backend_check, "engine_version", lambda python: "0.32.0")
    monkeypatch.setattr(serve_bench, "measure", None)
    assert main([f"backend.python={sys.executable}", *argv]) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert line in printed


def test_a_wrong_option_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--in-flight", "0"])
    assert "'0'; valid: numbers above 0" in capsys.readouterr().err
