"""The serving benchmark: loads, figures of a load, and the sentence about a method."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from espalier.harness.config.build_spec import specs_of
from espalier.harness.errors import UserError
from espalier.harness.runs.served import backend_check
from espalier.harness.stats import Interval
from espalier.serve import load as load_module
from espalier.serve.load import Load
from lab.bench import serve_bench
from lab.bench.load_clients import TimedEngine, steady
from lab.bench.serve_bench import (
    Loads,
    goodput,
    in_time,
    in_words,
    main,
    page,
    sentence,
    summary,
    title,
    write,
)
from lab.pages.serve_page import MEASURED
from tests.serve.stubs import put_module


def entry(sent: float, wait: float = 0.1) -> dict[str, Any]:
    return {"sent": sent, "first": wait, "end": wait + 0.2, "gaps": [0.1, 0.1], "prompt": 45}


def reply(*entries: dict[str, Any]) -> dict[str, Any]:
    timed = {"encoder": 0.4, "selection": 0.1, "others": 0.25, "load_average": 2.5}
    return {"requests": entries, "blocks": {"mean": 2.5, "peak": 4.0}, **timed}


def loop(wait: float, requests: int = 8) -> dict[str, Any]:
    """A loop with one request in flight."""
    return reply(*(entry((wait + 0.2 + 1e-9) * number, wait) for number in range(requests)))


def rows(lives: int = 3) -> pd.DataFrame:
    """Times of a method that is slower alone, faster under load, and in time at one rate more."""
    entries = []
    for life in range(lives):
        for method, alone, loaded, late in (
            ("none", 0.2, 0.8, 40),
            ("divprune", 0.4, 0.4, 6),
        ):
            head = {"model": "m", "method": method, "ratio": 0.75, "life": life}
            for number, wait in ((1, alone + 0.01 * life), (16, loaded)):
                figures = summary(loop(wait), 45, 1, None)
                entries.append({**head, "in_flight": number, "rate": None, **figures})
            for rate, slow in ((2.0, 0), (4.0, late)):
                arrivals = [entry(n / rate, 0.9 if n < slow else 0.1) for n in range(100)]
                figures = summary(reply(*arrivals), 45, None, 0.5)
                entries.append({**head, "in_flight": None, "rate": rate, **figures})
    return pd.DataFrame(entries)


class FakeEngine:
    """Answers in turns of the event loop, and notes how many requests are in flight when one begins or ends."""

    def __init__(self) -> None:
        self.inside, self.numbers = 0, list[int]()

    async def generate(self, prompt: Any, sampling: Any, number: str) -> AsyncIterator[Any]:
        self.inside += 1
        self.numbers.append(self.inside)
        for _ in range(1 + int(number) % 3):  # answers are not equally long
            await asyncio.sleep(0.001)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])], prompt_token_ids=[1, 2])
        self.numbers.append(self.inside)
        self.inside -= 1


def test_a_closed_loop_keeps_its_number_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    put_module(monkeypatch, "vllm", SamplingParams=SimpleNamespace)
    kinds = SimpleNamespace(DELTA="delta")
    put_module(monkeypatch, "vllm.sampling_params", RequestOutputKind=kinds)
    engine, fake = TimedEngine.__new__(TimedEngine), FakeEngine()
    engine._engine, engine._sent, engine._shares = fake, 0, []
    monkeypatch.setattr(load_module, "cache_use", lambda: [0.25])
    (_, load) = Loads([4], [1.0], requests=30, seconds=60, tokens=1).closed()
    entries = asyncio.run(engine._closed(Load([1], 8, 0, tokens=1, **load), range(40)))
    assert (len(entries), load["requests"], set(engine._shares)) == (40, 40, {0.25})
    # It fills once, and is four at each end of an answer until the last request has been sent.
    assert fake.numbers[:4] == [1, 2, 3, 4]
    assert set(fake.numbers[4:-3]) == {4}
    figures = summary(reply(*entries), 2, 4, None)
    assert (figures["timed"], figures["mean_in_flight"]) == (32, pytest.approx(4, abs=0.2))


def test_ramp_up_and_drain_are_cut_off() -> None:
    """Two in flight: the first two answers and those after the last request count neither for rates nor times."""
    slow, fast = 9.8, 0.8
    burst = [entry(0, slow), entry(0, slow)]
    middle = [entry(10 + second, fast) for second in range(5) for _ in range(2)]
    drain = [entry(15, slow), entry(15, slow)]
    kept, begin, last = steady([*drain, *middle, *burst], 2)
    assert (len(kept), begin, last) == (10, 10, 15)
    figures = summary(reply(*burst, *middle, *drain), 45, 2, None)
    exact = {"requests": 14, "timed": 10, "seconds": 5, "requests_per_second": 2}
    exact |= {"first_ms": 800, "mean_in_flight": 2}
    assert {name: figures[name] for name in exact} == pytest.approx(exact)
    # All answers of an open loop are timed, since the last ones are the slowest.
    figures = summary(reply(*burst, *middle, *drain), 45, None, 1.0)
    exact = {"timed": 14, "seconds": 15, "requests_per_second": 12 / 15, "in_time": 10 / 14}
    assert {name: figures[name] for name in exact} == pytest.approx(exact)


def test_figures_of_a_load() -> None:
    waits = [0.1, 0.3, 0.6, 0.6]
    figures = summary(reply(*(entry(2.0 * n, wait) for n, wait in enumerate(waits))), 45, None, 0.5)
    exact = {"first_ms": 450, "gap_ms": 100, "end_ms": 650, "requests_per_second": 0.5}
    exact |= {"encoder_ms": 100, "selection_ms": 25, "in_time": 0.5, "blocks_peak": 4}
    exact |= {"others": 0.25, "load_average": 2.5}
    assert {name: figures[name] for name in exact} == pytest.approx(exact)
    own = summary({**loop(0.1), "selection": None}, 45, 1, None)
    assert math.isnan(own["selection_ms"])
    with pytest.raises(UserError, match=r"read prompts of \{45\} tokens; expected: 46"):
        summary(loop(0.1), 46, 1, None)


@pytest.mark.parametrize(("requests", "shown"), [(501, False), (502, True)])
def test_a_99th_percentile_needs_500_answers(requests: int, shown: bool) -> None:
    """The first and the last of one in flight are cut off."""
    figures = summary(loop(0.1, requests), 45, 1, None)
    assert figures["timed"] == requests - 2
    assert [math.isnan(figures[f"{name}_p99_ms"]) for name in ("first", "end")] == [not shown] * 2
    lines = page(rows().assign(first_p99_ms=figures["first_p99_ms"]), "a device")
    heads, _, *cells = (line.split(" | ") for line in lines if line.startswith("|"))
    place = heads.index("99 % (from 500 requests)")
    assert {line[place] for line in cells} == ({"100"} if shown else {""})


@pytest.mark.slow
def test_the_sentence_begins_with_what_speaks_against(tmp_path: Path) -> None:
    text = sentence(rows(), "divprune")
    assert text == (
        "`divprune` at 0.75 (prompts of 45 and 45 tokens): "
        "slower with 1 in flight first token 0.51x [0.48, 0.54], whole answer 0.67x [0.66, 0.69], "
        "requests a second 0.67x [0.66, 0.69]; "
        "choosing takes 25 % of the encoder's time; "
        "faster with 16 in flight first token 2.00x [2.00, 2.00], whole answer 1.67x [1.67, 1.67], "
        "requests a second 1.67x [1.67, 1.67]; "
        "goodput within 500 ms at least 4.00 [2.00, 4.00] against 2.00 [2.00, 2.00] requests a second."
    )
    rows().to_csv(tmp_path / "m.csv")
    lines = write(rows(), tmp_path / "serve_m", "a device")
    assert lines[0] == (
        "m in vLLM on a device, 3 engine lives of each in turns, medians of a load, means over lives; closed loops of "
        "at least 10 requests for each in flight, without ramp-up and drain; Poisson arrivals for at least 24 s a "
        "rate; in brackets 95 % intervals over lives, of shares at least a life's binomial one; other programs kept "
        "0.2 to 0.2 processors busy (load average with the engine's own: 2.5 to 2.5)."
    )
    (line,) = (line for line in lines if line.startswith("| 4.00 a second | `none`"))
    assert line.endswith(" | 0.60 [0.50, 0.69] |")
    title, *_, last = page(rows().assign(frames=8, selection_ms=math.nan), "a device")
    assert title.startswith("m, videos of 8 frames, in vLLM on")
    assert " |  | 0.94 [" in last
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".md", ".png", ".svg"}


def test_a_difference_that_is_not_shown_stands_between() -> None:
    noisy = rows()
    loaded = (noisy.method == "divprune") & (noisy.in_flight == 16)
    noisy.loc[loaded, "end_ms"] = [600, 1000, 1700]
    noisy.loc[(noisy.method == "divprune") & noisy.rate.notna(), "in_time"] = 0.5
    places = [
        sentence(noisy, "divprune").index(part)
        for part in (
            "slower with 1 in flight",
            "goodput within 500 ms below 2.00 [0.00, 0.00] against 2.00 [2.00, 2.00]",
            "no difference shown with 16 in flight whole answer",
            "faster with 16 in flight first token",
        )
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("lives", [1, 2])
def test_fewer_than_three_lives_have_no_intervals(lives: int) -> None:
    few = rows(lives)
    lines = page(few, "a device")
    assert not [line for line in lines if "[" in line or "interval" in line]
    assert lines[0].split(", ")[1].startswith(f"{lives} engine li")
    end = "goodput within 500 ms at least 4.00 against 2.00 requests a second."
    assert sentence(few, "divprune").endswith(end)


def shares(*lives: Sequence[float], timed: int = 900) -> pd.DataFrame:
    """Shares in time at 1, 2, 3, ... requests a second."""
    entries = [
        {"method": "m", "life": life, "rate": 1.0 + place, "in_time": share, "timed": timed}
        for life, values in enumerate(lives)
        for place, share in enumerate(values)
    ]
    return pd.DataFrame(entries)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (shares(*[[1, 1, 0.5]] * 3), "2.00 [2.00, 2.00]"),
        # One request in 900 decides nothing, and a miss does not hide the rates above it.
        (shares(*[[1, 0.899, 0.95, 0.2]] * 3), "3.00 [3.00, 3.00]"),
        (shares(*[[1, 0.899, 0.2]] * 3), "1.00 [1.00, 2.00]"),
        # Few requests and lives that differ widen it.
        (shares(*[[1, 0.95, 0.85]] * 3, timed=20), "2.00 [0.00, 3.00]"),
        (shares([1, 1], [1, 0.95], [1, 0.8]), "at least 2.00 [1.00, 2.00]"),
        (shares(*[[0.5, 0.1]] * 3), "below 1.00 [0.00, 0.00]"),
        (shares([0.5, 0.1]), "below 1.00"),
    ],
)
def test_goodput_has_an_interval(table: pd.DataFrame, text: str) -> None:
    assert goodput(table, "m")[1] == text


def test_a_share_has_the_wider_interval() -> None:
    alike, apart = in_time(shares(*[[1.0]] * 3, timed=100)), in_time(shares([1.0], [0.9], [0.8]))
    assert in_words(alike) == "1.00 [0.96, 1.00]"  # Wilson's of 100 of 100
    assert in_words(apart) == "0.90 [0.65, 1.00]"  # Student's of three lives


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(1.29, 1.0178, 1.633), "1.29x [1.02, 1.63]"),
        (Interval(1.23, 0.9971, 1.5), "1.23x [1.00, 1.50]"),
        (Interval(1.25, math.nan, math.nan), "1.25x"),
    ],
)
def test_intervals_have_two_decimals(interval: Interval, text: str) -> None:
    assert in_words(interval, "x") == text


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_pages_are_those_of_their_rows(path: Path) -> None:
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    device = text.split(" on ", 1)[1].split(", ", 1)[0]
    assert text == "\n".join(page(pd.read_csv(path), device)) + "\n"


def test_rates_and_limit_follow_from_the_first_life() -> None:
    """The limit is that with one request in flight, whatever numbers are typed."""
    loads = Loads([16, 4], (0.5, 2.0), requests=50, seconds=60, tokens=4)
    assert [*loads.closed()] == [
        {"in_flight": number, "requests": requests}
        for number, requests in ((1, 50), (4, 50), (16, 160))
    ]
    for wait in (0.1, 0.3):  # a later life changes nothing
        loads.settle([summary(loop(seconds), 45, 1, None) for seconds in (wait, 0.05)])
    assert (loads.rates, loads.limit) == (pytest.approx([2, 8]), pytest.approx(0.4))


@pytest.mark.parametrize(
    ("weights", "words"),
    [("trained", "seedling"), ("random", "seedling (random weights, 6 layers of 192)")],
)
def test_rows_name_random_weights(weights: str, words: str) -> None:
    assert title(specs_of("model=seedling", f"model.weights={weights}")[0].model) == words


def test_arrivals_last_a_minute() -> None:
    loads = Loads([1], [1.0], requests=50, seconds=60, tokens=1)
    for first in range(20):
        load = {"prompt": [1], "edge": 48, "first": first, "tokens": 1, "rate": 2.0}
        assert 60 <= Load(**load, requests=loads.arrivals(load)).arrivals()[-1] < 90


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
        (("--cfg", "job"), "--cfg job prints information only"),
        (("ratio=1", "method=random"), "ratio=1 must be a number in [0, 1)"),
    ],
)
def test_bad_input_is_one_line(argv, line, monkeypatch, capsys):
    monkeypatch.setattr(backend_check, "engine_version", lambda python: "0.32.0")
    monkeypatch.setattr(serve_bench, "measure", None)
    assert main([f"backend.python={sys.executable}", *argv]) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert line in printed
