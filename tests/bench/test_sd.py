"""What the benchmark of speculative decoding says of its figures: intervals, targets, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from espalier.harness.decoding.speculative.speculative_summary import speculative_block
from espalier.harness.errors import UserError
from lab.bench.bench_setup import Setup
from lab.bench.speculative_bench import KINDS, earlier, joined, kinds, tables
from lab.bench.speculative_goals import Goal, targets
from tests.decoding.test_summary import decoded


@pytest.mark.parametrize(
    ("interval", "bound", "verdict"),
    [
        ((1.1, 1.3), 2.0, "met"),
        ((0.9, 1.3), 2.0, "open"),
        ((0.7, 0.9), 2.0, "missed"),
        ((1.1, 1.3), 1.2, "met"),
        ((1.25, 1.3), 1.2, "not believable"),
        ((0.92, 0.95), 0.9, "not believable"),
        (None, 2.0, "met"),
        (None, 1.1, "not believable"),
        ((1.1, 1.3), None, "met"),
    ],
)
def test_a_target_is_met_where_the_whole_interval_says_so(interval, bound, verdict) -> None:
    assert Goal("decode", 1.2, 1.0, interval, bound).verdict == verdict


def test_some_targets_are_upper_ones() -> None:
    assert [
        Goal("machine", value, 0.02, lower_bound=False).verdict for value in (0.01, 0.02, 0.03)
    ] == [
        "met",
        "missed",
        "missed",
    ]


def test_each_kind_asks_for_its_answers_and_some_to_warm_up() -> None:
    kinds_by_name = {kind.name: kind for kind in kinds(Setup(quick=True))}
    assert tuple(kinds_by_name) == KINDS
    shown = {
        name: {part["type"] for chat in kind.chats for part in chat[0]["content"]}
        for name, kind in kinds_by_name.items()
    }
    assert shown == {
        "video": {"video", "text"},
        "captions": {"image", "text"},
        "long": {"image", "text"},
    }
    counted = {name: len(kind.chats) - kind.warming for name, kind in kinds_by_name.items()}
    assert counted == {"video": 2, "captions": 6, "long": 4}
    for kind in kinds_by_name.values():
        assert any(setting[0] == "method=vanilla_sd" for setting in kind.settings)  # the baseline


def row(method: str, overlap: bool, decode_seconds: list[float]) -> dict[str, Any]:
    """Answers of 16 s plain and `own` decoding, prefills of 9 s on both sides."""
    records = [
        decoded(
            spent=decoded().spent.__class__(9.0, 0.0, seconds, 5),
            plain=decoded().spent.__class__(9.0, 0.0, 16.0, 5),
        )
        for seconds in decode_seconds
    ]
    return {
        "kind": "captions",
        "method": method,
        "answers": len(decode_seconds),
        "seconds": [[record.plain.total, record.spent.total] for record in records if record.plain],
        "extra": {
            "speculative": speculative_block([record.entry() for record in records], overlap)
        },
    }


def test_every_speed_up_is_judged_with_its_interval() -> None:
    rows = [
        row("vanilla_sd gamma=2", False, [12.0, 13.0, 11.0, 12.0]),
        row("vanilla_sd gamma=3", False, [14.0, 13.0, 15.0, 14.0]),
        row("pearl", True, [8.0, 9.0, 8.5, 10.0]),
        row("parallelvlm", True, [1.0, 1.1, 0.9, 1.0]),
    ]
    goals = targets(rows, overhead=1.0)
    assert {goal["method"] for goal in goals} == {"pearl", "parallelvlm"}
    by = {(goal["method"], goal["what"]): goal for goal in goals}
    for (_, what), goal in by.items():
        assert (goal["interval"] is None) == (what in ("overlap", "machine over T_p"))
        if goal["interval"]:
            assert goal["interval"][0] < goal["value"] < goal["interval"][1]
    assert by["pearl", "decode over plain decoding"]["verdict"] == "met"
    # Against the better window, answer by answer: 4 x 21 s over 71.5 s.
    best = by["pearl", "end to end over the best vanilla SD"]
    assert (best["value"], best["verdict"]) == (pytest.approx(84 / 71.5), "met")
    # Two tokens a round that lasts as long as a step: sixteen times as fast is not believable.
    gained = by["parallelvlm", "decode over plain decoding"]
    assert (gained["bound"], gained["verdict"]) == (pytest.approx(2.0), "not believable")
    assert by["parallelvlm", "end to end over plain decoding"]["verdict"] == "not believable"
    lines = tables({"rows": rows, "targets": goals, "machine_ms": 1.0}).splitlines()
    assert any("not believable" in line for line in lines)
    widths = {line.count("|") for line in lines if line.startswith("| captions")}
    assert widths == {line.count("|") for line in lines if line.startswith("| answers")}


def test_what_rounds_allow_does_not_ask_how_acceptance_is_spread() -> None:
    at_once = speculative_block([decoded().entry()], overlap=True)
    # Four tokens in two rounds of max(2 x 1.5, 4) s, where a token takes 4 s.
    assert at_once["speedup_bound"] == pytest.approx(2.0)
    in_turn = speculative_block([decoded().entry()], overlap=False)
    assert in_turn["speedup_bound"] == pytest.approx(4 * 4 / (2 * (2 * 1.5 + 4)))


def test_kinds_that_are_not_measured_again_stay_with_where_they_were_measured() -> None:
    here, there = ({"cores": 2, "load_average": load} for load in (0.5, 3.0))
    old = [{"kind": kind, "method": "old"} for kind in ("captions", "long")]
    before = {"rows": old, "conditions": there}
    new = [{"kind": "video", "method": "new"}, {"kind": "long", "method": "new"}]
    rows, places = joined(new, here, before)
    assert [(row["kind"], row["method"]) for row in rows] == [
        ("video", "new"),
        ("captions", "old"),
        ("long", "new"),
    ]
    assert places == {"video": here, "captions": there, "long": here}
    # A second time, the places of the first are what counts.
    again = {"rows": rows, "conditions": here, "conditions_of": places}
    rows, places = joined([{"kind": "video", "method": "third"}], there, again)
    assert [row["method"] for row in rows] == ["third", "old", "new"]
    assert places == {"video": there, "captions": there, "long": here}
    assert joined(new, here, {})[1] == {"video": here, "long": here}


def test_earlier_figures_of_another_form_are_refused(tmp_path: Path) -> None:
    assert earlier(tmp_path) == earlier(None) == {}
    (tmp_path / "bench_sd.json").write_text('{"schema": 1}')
    with pytest.raises(UserError, match=r"bench_sd\.json: schema 1; valid: 2, or a run without"):
        earlier(tmp_path)
