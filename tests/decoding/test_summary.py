"""The figures of a row: computed by hand for a made-up answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from espalier.harness.decoding.speculative.decoding_record import (
    AnswerTimes,
    DecodingRecord,
    ForwardTimes,
    Mismatch,
    Round,
)
from espalier.harness.decoding.speculative.speculative_summary import speculative_block


def decoded(**changed: Any) -> DecodingRecord:
    fields = {
        "gamma": 2,
        "rounds": (
            Round(0, 2, 1, 1, False, 9.0, 5.0, 9.0, 5.0, 9.0),
            Round(1, 2, 2, 2, False, 4.0, 3.0, 4.0, 2.0, 4.0),
            Round(1, 2, 2, 1, True, 4.0, 3.0, 4.0, 2.0, 3.0),
        ),
        "spent": AnswerTimes(9.0, 1.0, 8.0, 5),
        "plain": AnswerTimes(9.0, 0.0, 16.0, 5),
        "mismatch": None,
        "steps": ForwardTimes(6.0, 2.0),
        "draft_visual": 7.0,
        "devices": 1,
        "first": True,
        "degraded": None,
    }
    return DecodingRecord(**(fields | changed))


def test_the_figures_of_a_row() -> None:
    record = decoded()
    assert DecodingRecord.from_entry(json.loads(json.dumps(record.entry()))) == record
    block = speculative_block([record.entry()], overlap=True)
    assert block["speedup_decode"] == pytest.approx(2.0)
    assert block["speedup_end_to_end"] == pytest.approx(25 / 18)
    assert block["speedup_per_device"] == pytest.approx(25 / 36)
    # Of the time that processors worked, 2 of the draft and 4 and 3 of the target; the first round is the prefill.
    assert block["overlap_efficiency"] == pytest.approx((2 + 4 - 4 + 2 + 3 - 4) / (2 + 2))
    waiting = tuple(
        replace(part, seconds=9.0) for part in record.rounds
    )  # both sides are idle most of the time
    assert speculative_block([decoded(rounds=waiting).entry()], True)["overlap_efficiency"] == 0
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
    windows = tuple(replace(part, target_seconds=5.0) for part in record.rounds)
    slower = speculative_block([decoded(rounds=windows).entry()], overlap=True)
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
    without_plain = speculative_block([decoded(plain=None).entry()], overlap=True)
    assert without_plain["target_ms"] == 6000  # nothing but the step measured before
    assert without_plain["speedup_predicted"] == pytest.approx(tokens)
    assert without_plain["predicted_reached"] is None


def test_mismatches_are_counted() -> None:
    records = [decoded(), decoded(mismatch=Mismatch(3, 0.25)), decoded(mismatch=Mismatch(2, 0.125))]
    block = speculative_block([record.entry() for record in records], overlap=True)
    assert block["mismatches"] == {
        "compared": 3,
        "answers": 2,
        "first_place": 2,
        "largest_gap": 0.25,
    }


def test_an_answer_that_the_target_finished_alone_counts_in_what_was_gained_and_nowhere_else() -> (
    None
):
    """Its rounds are of two kinds, and its time is of one side and the patience that was lost."""
    late = decoded(
        degraded="it hangs",
        rounds=(*decoded().rounds, Round(1, 3, 3, 0, True, 90.0, 70.0, 8.0, 70.0, 8.0)),
        spent=AnswerTimes(9.0, 1.0, 98.0, 5),
        plain=AnswerTimes(9.0, 0.0, 16.0, 5),
    )
    alone = speculative_block([decoded().entry()] * 2, overlap=True)
    block = speculative_block(
        [record.entry() for record in (decoded(), late, decoded())], overlap=True
    )
    assert block["degraded"] == {"answers": 1, "why": "it hangs"}
    assert block["rounds"] == 4  # of eight behind the prefills
    gained = {name for name in block if name.startswith("speedup") and "predicted" not in name}
    apart = gained | {"degraded", "mismatches"}
    assert {name: block[name] for name in block.keys() - apart} == {
        name: alone[name] for name in alone.keys() - apart
    }
    assert block["speedup_decode"] == pytest.approx(3 * 16 / (8 + 98 + 8))
    assert block["speedup_end_to_end"] == pytest.approx(3 * 25 / (18 + 108 + 18))


def test_speed_ups_are_totals_over_totals_and_means_of_ratios_say_so() -> None:
    """A short answer that gains four times and a long one that gains a quarter, nine times as many tokens."""
    short = decoded(spent=AnswerTimes(2.0, 0.0, 1.0, 3), plain=AnswerTimes(2.0, 0.0, 4.0, 3))
    long = decoded(spent=AnswerTimes(2.0, 0.0, 72.0, 19), plain=AnswerTimes(2.0, 0.0, 90.0, 19))
    block = speculative_block([short.entry(), long.entry()], overlap=True)
    assert block["speedup_decode"] == pytest.approx(94 / 73)
    assert block["speedup_decode_mean_of_ratios"] == pytest.approx((4 + 1.25) / 2)
    assert block["speedup_end_to_end"] == pytest.approx(98 / 77)
    assert block["speedup_end_to_end_mean_of_ratios"] == pytest.approx((6 / 3 + 92 / 74) / 2)
    # The prediction weighs its answers in the same way: a step of plain decoding is that of all tokens.
    assert block["target_ms"] == pytest.approx(1000 * 94 / 20)
    assert block["predicted_reached"] == pytest.approx(94 / 73 / block["speedup_predicted"])


def test_sampled_answers_of_other_lengths_are_compared_by_the_token() -> None:
    record = decoded(spent=AnswerTimes(1.0, 0.0, 8.0, 9), plain=AnswerTimes(1.0, 0.0, 4.0, 3))
    block = speculative_block([record.entry()], overlap=True)
    assert block["speedup_decode"] == pytest.approx((4 / 2) / (8 / 8))
    assert block["speedup_end_to_end"] == pytest.approx((5 / 3) / (9 / 9))


def test_an_answer_of_one_token_says_nothing_of_decoding() -> None:
    single = decoded(spent=AnswerTimes(2.0, 0.0, 0.5, 1), plain=AnswerTimes(2.0, 0.0, 0.1, 1))
    block = speculative_block([single.entry(), decoded().entry()], overlap=True)
    assert block["speedup_decode"] == pytest.approx(2.0)
    assert block["speedup_end_to_end"] == pytest.approx((27.1 / 6) / (20.5 / 6))
    alone = speculative_block([single.entry()], overlap=True)
    assert alone["speedup_decode"] is None
    assert alone["predicted_reached"] is None


def test_an_interval_is_over_answers() -> None:
    pairs = [
        decoded(spent=AnswerTimes(1.0, 0.0, seconds, 5), plain=AnswerTimes(1.0, 0.0, 16.0, 5))
        for seconds in (8.0, 8.0, 4.0, 16.0, 8.0, 6.0)
    ]
    block = speculative_block([record.entry() for record in pairs], overlap=True)
    for name in ("speedup_decode", "speedup_end_to_end"):
        low, high = block[f"{name}_interval"]
        assert low < block[name] < high
    assert 1.0 < block["speedup_decode_interval"][0] < 1.6
    assert 2.2 < block["speedup_decode_interval"][1] < 4.0
    assert speculative_block([pairs[0].entry()], True)["speedup_decode_interval"] is None


@pytest.mark.parametrize(
    ("target", "more", "expected"), [(1, 0, 1.0), (1, 1, 1 / 2), (4, 1, 4 / 5), (4, 0, 1.0)]
)
def test_a_device_is_compared_with_one_of_plain_decoding(target, more, expected) -> None:
    """Plain decoding occupies the target's devices, and both sides those and the draft's own."""
    lost = decoded(devices=0, target_devices=target, degraded="it hangs")
    record = decoded(devices=more, target_devices=target)
    block = speculative_block([lost.entry(), record.entry()], overlap=True)
    assert block["devices"] == target + more
    assert block["target_devices"] == target
    assert block["speedup_per_device"] == pytest.approx(block["speedup_end_to_end"] * expected)


def test_two_streams_of_one_gpu_have_no_overlap_to_tell() -> None:
    """Each counts the other's kernels as its own time."""
    assert speculative_block([decoded(apart=False).entry()], True)["overlap_efficiency"] is None


def test_the_window_of_a_row_is_the_middle_one() -> None:
    rows = [decoded(gamma=gamma).entry() for gamma in (9, 2, 3)]
    assert speculative_block(rows, overlap=True)["gamma"] == 3


def test_answers_with_windows_of_their_own_add_up() -> None:
    """A round of two drafted tokens takes the draft 3 s, one of four 6 s: 1.5 s a token in both."""
    long = tuple(replace(part, drafted=4, draft_seconds=6.0) for part in decoded().rounds)
    records = [decoded(), decoded(), decoded(gamma=4, rounds=long)]
    block = speculative_block([record.entry() for record in records], overlap=True)
    assert block["gamma"] == 2
    assert block["draft_ms"] == pytest.approx(1500)
    a = 0.75
    small = (1 + a) / (1 + a - a**2) * 4 / 4
    large = (1 + a + a**2 + a**3) / (1 + a - a**4) * 4 / 6
    assert block["speedup_predicted"] == pytest.approx(3 / (2 / small + 1 / large))


def test_the_mean_of_ratios_is_one_of_seconds_a_token() -> None:
    """Answers of a sampling run may differ in length from those of plain decoding."""
    # After the prefills 16 s for 4 tokens against 6 s for 2, and 10 s for 5 against 10 s for 2.
    spent = (AnswerTimes(9.0, 1.0, 6.0, 3), AnswerTimes(9.0, 0.0, 10.0, 3))
    plain = (AnswerTimes(9.0, 0.0, 16.0, 5), AnswerTimes(9.0, 0.0, 10.0, 6))
    records = [
        decoded(spent=decoded_times, plain=slow)
        for decoded_times, slow in zip(spent, plain, strict=True)
    ]
    block = speculative_block([record.entry() for record in records], overlap=True)
    assert block["speedup_decode_mean_of_ratios"] == pytest.approx((4 / 3 + 2 / 5) / 2)
    assert block["speedup_decode"] == pytest.approx((26 / 9) / (16 / 4))


def test_a_tree_takes_a_draft_forward_for_each_level_and_not_for_each_node() -> None:
    tree = tuple(Round(3, 7, 3, 1, True, 4.0, 3.0, 4.0, 2.0, 3.0) for _ in range(4))
    block = speculative_block([decoded(gamma=3, rounds=tree).entry()], overlap=False)
    assert block["draft_ms"] == pytest.approx(1000)
    assert block["c"] == pytest.approx(4)
