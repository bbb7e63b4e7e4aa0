"""The figures of a row: computed by hand for a made-up answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from harness.decoding.summary import speculative_block
from harness.decoding.telling import Mismatch, Spent, Steps, Telling
from harness.decoding.trace import Round


def telling(**changed: Any) -> Telling:
    made = {
        "gamma": 2,
        "rounds": (
            Round(0, 2, 1, 1, False, 9.0, 5.0, 9.0),
            Round(1, 2, 2, 2, False, 4.0, 3.0, 4.0),
            Round(1, 2, 2, 1, True, 4.0, 3.0, 4.0),
        ),
        "spent": Spent(9.0, 1.0, 8.0, 5),
        "plain": Spent(9.0, 0.0, 16.0, 5),
        "mismatch": None,
        "steps": Steps(6.0, 2.0),
        "draft_visual": 7.0,
        "devices": 1,
        "first": True,
        "degraded": None,
    }
    return Telling(**(made | changed))


def test_the_figures_of_a_row() -> None:
    one = telling()
    assert Telling.from_entry(json.loads(json.dumps(one.entry()))) == one
    block = speculative_block([one.entry()], overlap=True)
    assert block["speedup_decode"] == pytest.approx(2.0)
    assert block["speedup_end_to_end"] == pytest.approx(25 / 18)
    assert block["speedup_per_device"] == pytest.approx(25 / 36)
    assert block["overlap_efficiency"] == pytest.approx(1.0)  # the first round is the prefill
    assert block["acceptance"] == pytest.approx(3 / 4)
    assert block["tokens_per_target_forward"] == pytest.approx(2.0)
    assert block["mean_run"] == pytest.approx(3.0)
    assert block["rollbacks"] == 1
    # A step of plain decoding, the target's forward in a round, and a drafted token: all of this run.
    times = [block[name] for name in ("target_ms", "window_ms", "draft_ms")]
    assert times == pytest.approx([4000, 4000, 1500])
    assert block["c"] == pytest.approx(4 / 1.5)
    assert block["c_before"] == pytest.approx(3)
    a = 0.75
    tokens = (1 + a) / (1 + a - a**2)
    assert block["speedup_predicted"] == pytest.approx(tokens * 4 / 4)
    assert block["predicted_reached"] == pytest.approx(2 / tokens)
    windows = tuple(replace(part, target_seconds=5.0) for part in one.rounds)
    slower = speculative_block([telling(rounds=windows).entry()], overlap=True)
    assert slower["speedup_predicted"] == pytest.approx(tokens)
    assert slower["speedup_predicted_window"] == pytest.approx(tokens * 4 / 5)
    assert slower["predicted_window_reached"] == pytest.approx(2 / tokens * 5 / 4)
    assert block["mismatches"] == {
        "compared": 1,
        "answers": 0,
        "first_place": None,
        "largest_gap": None,
    }
    assert block["startup_wait_ms"] == 1000
    alone = speculative_block([telling(plain=None).entry()], overlap=True)
    assert alone["target_ms"] == 6000  # nothing but the step measured before
    assert alone["speedup_predicted"] == pytest.approx(tokens)
    assert alone["predicted_reached"] is None


def test_degraded_answers_and_mismatches_are_counted() -> None:
    found = [
        telling(),
        telling(degraded="it hangs", rounds=(Round(0, 0, 0, 0, True),)),
        telling(mismatch=Mismatch(3, 0.25)),
    ]
    block = speculative_block([one.entry() for one in found], overlap=True)
    assert block["degraded"] == {"answers": 1, "why": "it hangs"}
    assert block["mismatches"]["answers"] == 1
    assert block["mismatches"]["first_place"] == 3
    assert block["mismatches"]["largest_gap"] == 0.25
    assert block["rounds"] == 4  # none of the degraded answer's


def test_answers_with_windows_of_their_own_add_up() -> None:
    """A round of two drafted tokens takes the draft 3 s, one of four 6 s: 1.5 s a token in both."""
    long = tuple(replace(part, drafted=4, draft_seconds=6.0) for part in telling().rounds)
    both = [telling(), telling(), telling(gamma=4, rounds=long)]
    block = speculative_block([one.entry() for one in both], overlap=True)
    assert block["gamma"] == 2
    assert block["draft_ms"] == pytest.approx(1500)
    a = 0.75
    small = (1 + a) / (1 + a - a**2) * 4 / 4
    large = (1 + a + a**2 + a**3) / (1 + a - a**4) * 4 / 6
    assert block["speedup_predicted"] == pytest.approx(3 / (2 / small + 1 / large))
