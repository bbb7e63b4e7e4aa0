"""Damaged journals: every intact entry counts, damaged ones are reported in one line and answered again."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from espalier.harness.engine.record import SampleRecord
from espalier.harness.evaluation.batch_answers import journalled_batch_size
from espalier.harness.evaluation.journal_scores import read_scorings
from espalier.harness.evaluation.samples import Failure, Sample, SampleErrors, finished_samples
from espalier.harness.store.files.journal import Journal
from tests.refused import refused

RECORDED = SampleRecord("t/0", 4, 3, (2,), (2,), (4, 2), 6, 384, 1, times_ms={"prefill": 1.0})
GOOD: dict[str, Any] = Sample("t", 0, "yes", 7, 1, RECORDED).entry()

#: Changes of an entry, and words of the line about it; None takes a key away.
DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"answer": 5}, "answer is 5"),
    ({"doc_id": "0"}, "doc_id is '0'"),
    ({"doc_id": [0]}, "doc_id is [0]"),
    ({"task": None}, "task is None"),
    ({"input_tokens": None}, "input_tokens is None"),
    ({"output_tokens": True}, "output_tokens is True"),
    ({"record": "none"}, "not a table"),
    ({"record": None}, "not a table"),
    ({"record": {}}, "sample is None"),
    ({"record": {**GOOD["record"], "kept": 2}}, "kept is 2"),
    ({"record": {**GOOD["record"], "entering": ["4"]}}, "entering is ['4']"),
    ({"record": {**GOOD["record"], "times_ms": {"prefill": "1"}}}, "times_ms"),
    ({"record": {**GOOD["record"], "decoding": [1]}}, "decoding is [1]"),
    ({"record": {**GOOD["record"], "shared": [1]}}, "shared is [1]"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_a_damaged_answer_is_named_and_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    other = f"other of {tmp_path.name}"  # a line is said once in a process
    damaged = {k: v for k, v in {**GOOD, "task": other, **change}.items() if v is not None}
    assert list(finished_samples([damaged, GOOD])) == [("t", 0)]
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_fields_of_later_versions_do_not_matter() -> None:
    later = {**GOOD, "colour": "red", "record": {**GOOD["record"], "colour": ["red"]}}
    assert finished_samples([later]) == finished_samples([GOOD])


def test_damaged_scores_and_batch_sizes_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"task": "t", "doc_id": 1, "scores": {"acc": 1.0}}
    scorings = read_scorings(
        [scores, {**scores, "scores": "all"}, {**scores, "scores": {"acc": "1"}}]
    )
    assert {key: scoring.scores for key, scoring in scorings.items()} == {("t", 1): {"acc": 1.0}}
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert journalled_batch_size([{"batch_size": "x"}, {"batch_size": 0}, {"batch_size": 4}]) == 4


JUNK = [b"\xff\xfe\x00\x01", b"[1, 2]", b"7", b'{"half": ', b"[" * 100_000, b"null"]


def test_damaged_lines_are_counted_and_left_out(
    journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.path.write_bytes(b"\n".join([*JUNK, json.dumps(GOOD).encode(), b'{"torn']))
    for _ in range(2):
        assert journal.entries() == [json.loads(json.dumps(GOOD))]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"store: {journal.path}: {len(JUNK)} damaged lines are left out"


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_journal_that_is_no_file_is_one_line(journal: Journal, kind: str) -> None:
    (os.mkdir if kind == "folder" else os.mkfifo)(journal.path)
    assert "journal.jsonl is not a file; remove it" in refused(journal.entries)


@pytest.mark.parametrize(
    ("count", "rest"), [(1, ""), (5, ""), (6, "; and 1 more"), (9, "; and 4 more")]
)
def test_an_error_line_names_five_failures_and_counts_the_rest(count: int, rest: str) -> None:
    error = SampleErrors([Failure("t", number, "E: x") for number in range(count)], 20)
    named = "; ".join(f"t/{number}: E: x" for number in range(min(count, 5)))
    assert str(error).startswith(f"{count} of 20 samples failed: {named}{rest} (finished")
    again = pickle.loads(pickle.dumps(error))
    assert (again.failures, again.total, str(again)) == (error.failures, 20, str(error))
