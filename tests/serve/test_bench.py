"""The serving benchmark: loads, figures of a load, and the sentence about a method."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from espalier.harness.errors import UserError
from espalier.harness.runs.served import backend_check
from espalier.harness.tools.serving import serve_bench
from espalier.harness.tools.serving.serve_bench import Loads, main, summary
from espalier.harness.tools.serving.serve_report import goodput, page, sentence, write
from espalier.serve.load import Load


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
    assert figures["first_ms"] == pytest.approx(450)
    assert figures["gap_ms"] == pytest.approx(100)
    assert figures["end_ms"] == pytest.approx(650)
    assert (figures["requests_per_second"], figures["tokens_per_second"]) == (2, 6)
    assert (figures["encoder_ms"], figures["selection_ms"]) == (100, 25)
    assert (figures["in_time"], figures["blocks_peak"]) == (0.5, 4)
    assert summary({**reply(0.1), "selection": None}, 45, None)["selection_ms"] is None
    with pytest.raises(UserError, match=r"read prompts of \{45\} tokens; expected: 46"):
        summary(reply(0.1), 46, None)


def test_the_sentence_is_that_of_the_rows(tmp_path: Path):
    text = sentence(rows(), "divprune")
    assert text.startswith("`divprune` at 0.75 is 1.95x [1.8, 2.07] sooner alone and 1.00x [1, 1]")
    assert "(16 in flight; " in text
    assert text.endswith("within 500 ms: at least 4.00 against 2.00 requests a second.")
    assert goodput(rows(), "none") == "2.00"
    lines = write(rows(), tmp_path / "deep" / "serve_m", "a device")
    assert any(line.startswith("| 2.00 a second | `none` | 300 | 300 | 100.0 |") for line in lines)
    assert lines[0].startswith("m in vLLM on a device, 3 engine lives")
    videos = rows().assign(frames=8, selection_ms=None)
    title, *_, last = page(videos, "a device")
    assert title.startswith("m, videos of 8 frames, in vLLM on")
    assert last.endswith("| - |")
    written = {path.suffix for path in (tmp_path / "deep").iterdir()}
    assert written == {".csv", ".md", ".png", ".svg"}


def test_rates_follow_from_the_first_unpruned_life():
    loads = Loads((1, 64), (0.5, 2.0), requests=8, tokens=4)
    assert [load["requests"] for load in loads.closed()] == [8, 64]
    for seconds in (2.0, 1.0):  # a later life changes nothing
        loads.settle([summary(reply(0.1, 0.1, seconds=seconds), 45, None)])
    assert loads.rates == [0.5, 2.0]
    assert loads.limit == pytest.approx(0.4)


def test_arrivals_and_pictures_are_those_of_the_numbers():
    load = Load([1], edge=48, first=7, requests=200, tokens=1, rate=4.0)
    times = load.arrivals()
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
