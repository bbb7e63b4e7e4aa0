"""Shares of words, BLEU and METEOR, against nltk and sacrebleu."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.metrics import f_measure, precision, recall
from nltk.translate.meteor_score import meteor_score
from sacrebleu.metrics import BLEU

from harness.scoring.words import bleu, meteor, read_label, read_scores, shares, words

SENTENCES = st.lists(
    st.sampled_from(
        ["the", "The", "cat", "cats", "run", "running", "runs", "on", "mat", ".", "14"]
    ),
    max_size=12,
)
FULL = SENTENCES.filter(bool)


class NoSynonyms:
    """A WordNet in which no word means anything."""

    def synsets(self, word: str) -> list[Any]:
        return []


def test_a_chinese_character_is_a_word() -> None:
    assert words("SA8000 \u4eca\u5929, ok") == ["SA8000", "\u4eca", "\u5929", ",", "ok"]
    assert words(" \n ") == []
    assert words("plain words\nonly") == ["plain", "words", "only"]


@given(SENTENCES, FULL)
def test_shares_are_those_of_nltk(said: list[str], right: list[str]) -> None:
    one, other = set(said), set(right)
    wanted = [measure(other, one) or 0.0 for measure in (precision, recall, f_measure)]
    assert shares(said, right) == pytest.approx(wanted)


def test_shares_by_hand() -> None:
    assert shares(["a", "b", "b"], ["a", "c", "d"]) == pytest.approx((1 / 2, 1 / 3, 2 / 5))


@given(FULL, FULL)
def test_bleu_is_that_of_sacrebleu(said: list[str], right: list[str]) -> None:
    reference = BLEU(
        smooth_method="none", tokenize="none", max_ngram_order=4, effective_order=False
    )
    wanted = reference.corpus_score([" ".join(said)], [[" ".join(right)]]).score / 100
    assert bleu(said, right) == pytest.approx(wanted, abs=1e-9)


def test_bleu_by_hand() -> None:
    right = ["the", "cat", "is", "on", "the", "mat"]
    assert bleu(right, right) == pytest.approx(1)
    assert bleu([], right) == 0
    # Shares of 5/6, 3/5, 2/4 and 1/3 of the n-grams.
    said = ["the", "cat", "was", "on", "the", "mat"]
    assert bleu(said, right) < 1e-6
    said = ["a", "cat", "is", "on", "the", "mat"]
    assert bleu(said, right) == pytest.approx((5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)


@given(SENTENCES, FULL)
def test_meteor_is_nltks_without_synonyms(said: list[str], right: list[str]) -> None:
    wanted = meteor_score([right], said, wordnet=NoSynonyms()) if said else 0.0
    assert meteor(said, right) == pytest.approx(wanted)


def test_all_scores_of_a_text() -> None:
    perfect = read_scores("one two three four", "one two three four")
    assert perfect["meteor"] == pytest.approx(1 - 0.5 / 64)
    assert {name: value for name, value in perfect.items() if name != "meteor"} == pytest.approx(
        {"edit_distance": 0, "f1": 1, "precision": 1, "recall": 1, "bleu": 1}
    )
    nothing = read_scores("", "one two")
    assert nothing == {
        "edit_distance": 1,
        "f1": 0,
        "precision": 0,
        "recall": 0,
        "bleu": 0,
        "meteor": 0,
    }


def test_scene_texts_are_compared_without_order() -> None:
    assert read_label("EXIT-2, (way)\nout*", scene=True, one_line=False) == "2 EXIT out way"
    assert read_label("a*b\nc", scene=False, one_line=True) == "a b c"
    assert read_label("a*b\nc", scene=False, one_line=False) == "a*b\nc"


@pytest.mark.parametrize(
    "answer", ["", " \n\t", "x" * 100_000, "word " * 20_000, "\u4eca" * 100_000, "\ud800"]
)
def test_odd_answers_raise_nothing(answer: str) -> None:
    scores = read_scores(answer, "one two three four five")
    assert all(0 <= value <= 1 for value in scores.values())
    assert scores["precision"] == 0
