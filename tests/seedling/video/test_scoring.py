from __future__ import annotations

import pytest

from espalier.harness.seedling.video.clip_benchmarks import (
    caption_score,
    caption_sentences,
    conclusion,
    digits_score,
    moment,
    moment_score,
    only_digits,
)
from espalier.harness.seedling.video.events import KINDS, Event, caption, sentence

EVENTS = (
    Event("present", 0, 0, "red", "star", "top left", (2, 4, 20, 22)),
    Event("present", 0, 1, "blue", "frame", "middle right", (66, 40, 90, 64), digit="7"),
    Event("turn", 4, 0, "red", "star", "top left", (2, 4, 20, 22), outcome="green"),
    Event("change", 9, 1, "blue", "frame", "middle right", (66, 40, 90, 64), "7", "3"),
)
RIGHT = (
    "at time t0 there is a red star at the top left ; "
    "at time t0 there is a blue frame with digit 7 at the middle right ; "
    "at time t4 the red star at the top left turns green ; "
    "at time t9 the blue frame at the middle right changes from digit 7 to digit 3 ;"
)
GARBAGE = [
    "",
    " \n",
    "; ; ;",
    "at time t4 ;",
    "at time t99999999999999999999 the red star leaves from the top left ;",
    "t4",
    "<loc_1> " * 40,
    "ünïcode ✓ 💥",
    "9" * 5000,
    "at time t4 the red star at the top left turns green and blue ;",
]


def test_the_wording_is_pinned():
    assert caption(EVENTS) == RIGHT


def test_the_right_caption_is_all_right():
    score = caption_score(RIGHT, EVENTS)
    words = {"words": len(RIGHT.split())}
    shares = dict.fromkeys(("events_right", "events_precision", "events_exact"), 1)
    assert score == {**shares, **words, "unparsed": 0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("digit", ["", "4"])
def test_every_sentence_is_understood(kind, digit):
    outcome = {"turn": "white", "change": "9", "move": "bottom centre"}.get(kind, "")
    event = Event(
        kind, 31, 0, "cyan", "frame" if digit else "cross", "top left", (0, 0, 9, 9), digit, outcome
    )
    if kind == "change" and not digit:
        return  # shapes show no digit
    ((frame, _),) = caption_sentences(sentence(event))
    assert frame == 31


@pytest.mark.parametrize(
    ("frame", "recall", "exact"), [(4, 1, 1), (5, 1, 0.75), (3, 1, 0.75), (6, 0.75, 0.75)]
)
def test_times_may_be_off_by_one(frame, recall, exact):
    score = caption_score(RIGHT.replace("t4", f"t{frame}"), EVENTS)
    assert (score["events_right"], score["events_exact"]) == (recall, exact)


def test_an_event_is_right_only_as_a_whole():
    for was, now in [
        ("turns green", "turns blue"),
        ("at the top left turns", "at the top right turns"),
    ]:
        assert caption_score(RIGHT.replace(was, now), EVENTS)["events_right"] == 0.75
    assert caption_score(RIGHT.replace("to digit 3", "to digit 8"), EVENTS)["events_right"] == 0.75
    assert caption_score(RIGHT.replace("red star", "red cross"), EVENTS)["events_right"] == 0.5


@pytest.mark.parametrize(
    ("family", "answer", "word"),
    [
        ("how_many", "red star blue frame 2", "2"),
        ("how_many", "0", "0"),
        ("how_many", "2 red star", "star"),
        ("how_many", "", ""),
        ("order", "t3 t14 before", "before"),
        ("order", "t3 t14 the red star leaves", "the red star leaves"),
        ("order", "after", "after"),
        ("order", "t3 t14", ""),
        ("when", "t3", "t3"),
        ("what", "red star", "red star"),
    ],
)
def test_a_count_is_the_last_word_and_an_order_what_is_no_time(family, answer, word):
    assert conclusion(family, answer) == word


def test_order_counts():
    parts = RIGHT.split(" ;")[:-1]
    swapped = " ; ".join(part.strip() for part in (parts[1], parts[0], parts[2], parts[3]))
    score = caption_score(swapped, EVENTS)
    assert (score["events_right"], score["events_precision"]) == (0.75, 0.75)


def test_repeats_and_inventions_cost_precision_not_recall():
    longer = RIGHT + " at time t4 the red star at the top left turns green ;"
    assert caption_score(longer, EVENTS)["events_right"] == 1
    assert caption_score(longer, EVENTS)["events_precision"] == 0.8


def test_what_is_missing_costs_recall():
    half = " ;".join(RIGHT.split(" ;")[:2]) + " ; at time t4 the red"  # cut off in mid-sentence
    score = caption_score(half, EVENTS)
    assert (score["events_right"], score["events_precision"]) == (0.5, 1)


@pytest.mark.parametrize("answer", GARBAGE)
def test_garbage_scores_nothing(answer):
    assert caption_score(answer, EVENTS)["events_right"] == 0
    assert not moment_score(answer, 4, (8, 8, 24, 24))["found"]


def test_no_events_at_all():
    assert caption_score(RIGHT, ())["events_right"] == 0


@pytest.mark.parametrize(
    ("answer", "hit", "near"),
    [
        ("t4 <loc_2> <loc_2> <loc_7> <loc_7>", True, True),
        ("t5 <loc_2> <loc_2> <loc_7> <loc_7>", True, True),
        ("t6 <loc_2> <loc_2> <loc_7> <loc_7>", False, False),
        ("t4 <loc_20> <loc_20> <loc_27> <loc_27>", False, True),
        ("t4 t5 <loc_2> <loc_2> <loc_7> <loc_7>", False, False),
        ("t4 <loc_2> <loc_2> <loc_7>", False, True),
        ("<loc_2> <loc_2> <loc_7> <loc_7>", False, False),
    ],
)
def test_found_is_the_moment_and_the_box(answer, hit, near):
    score = moment_score(answer, 4, (6, 6, 24, 24))
    assert (score["found"], score["moment_near"]) == (hit, near)
    assert score["unparsed"] != (answer.count("t") == 1 and answer.count("loc") == 4)


def test_half_of_the_union_is_enough():
    # Bins 2..7 stand for pixels 7..23: 16 x 16. A truth twice as wide shares half of it.
    answer = "t4 <loc_2> <loc_2> <loc_7> <loc_7>"
    assert moment_score(answer, 4, (7, 7, 39, 23))["found"]
    assert not moment_score(answer, 4, (7, 7, 40, 23))["found"]


@pytest.mark.parametrize(
    ("answer", "frame"), [("t7", 7), ("T7", None), ("t7 t7", None), ("7", None)]
)
def test_a_moment_is_one_time(answer, frame):
    assert moment(answer) == frame


def test_digits_are_read_whatever_their_times():
    assert digits_score("t0 3 t0 7 t14 5", "t0 3 t1 7 t15 5") == 1
    assert digits_score("3 7 5", "t0 3 t1 7 t15 5") == 1
    assert digits_score("t0 3 t14 5", "t0 3 t1 7 t15 5") == pytest.approx(2 / 3)
    assert only_digits("t0 3 t1 7")
    for malformed in ("", "t0 t1", "t0 3 red", "37"):
        assert not only_digits(malformed)
