"""Shares of words, BLEU and METEOR, by hand and against sacrebleu."""

from __future__ import annotations

import marshal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jieba
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU

from espalier.harness.evaluation.scoring import text_scores
from espalier.harness.evaluation.scoring.text_scores import (
    bleu,
    meteor,
    read_label,
    read_scores,
    shares,
    words,
)

FULL = st.lists(
    st.sampled_from(
        ["the", "The", "cat", "cats", "run", "running", "runs", "on", "mat", ".", "14"]
    ),
    min_size=1,
    max_size=12,
)


WEATHER = "\u5929\u6c14\u5f88\u597d\u3002"
CUT = ["\u5929\u6c14", "\u5f88", "\u597d", "\u3002"]
ENGLISH = ["SA8000", ",", " ", "ok"]
CAT = ["the", "cat", "is", "on", "the", "mat"]

#: Function, arguments, value.
BY_HAND: tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...] = (
    # Words stand between blanks where no text is Chinese.
    (
        words,
        (" plain words,\nonly", "\u3002 \u9fff \n"),
        (["plain", "words,", "only"], ["\u3002", "\u9fff"]),
    ),
    # Both texts are cut by jieba where one is.
    (words, (WEATHER, "SA8000, ok"), (CUT, ENGLISH)),
    (words, ("SA8000, ok", WEATHER), (ENGLISH, CUT)),
    # The first and the last character that make a text Chinese.
    *((words, ("a, b", text), (["a", ",", " ", "b"], [text])) for text in "\u4e00\u9fa5"),
    (shares, (["a", "b", "b"], ["a", "c", "d"]), pytest.approx((1 / 2, 1 / 3, 2 / 5))),
    # A match of stems: one chunk, precision 1 and recall 1/2.
    (meteor, (["Running"], ["runs", "on"]), pytest.approx(0.5 / 0.95 / 2)),
    (meteor, ([], CAT), 0),
    (bleu, (CAT, CAT), pytest.approx(1)),
    (bleu, ([], CAT), 0),
    # Shares of 5/6, 3/5, 1/4 and none of the n-grams.
    (bleu, (["the", "cat", "was", "on", "the", "mat"], CAT), pytest.approx(0, abs=1e-6)),
    (bleu, (["a", *CAT[1:]], CAT), pytest.approx((5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)),
    # Texts of scenes are compared without order.
    (read_label, ("EXIT-2, (way)\nout*", True, False), "2 EXIT out way"),
    (read_label, ("a*b\nc", False, True), "a b c"),
    (read_label, ("a*b\nc", False, False), "a*b\nc"),
)


@pytest.mark.sampled
@pytest.mark.parametrize(("function", "arguments", "value"), BY_HAND)
def test_words_and_shares_by_hand(
    function: Callable[..., Any], arguments: tuple[Any, ...], value: Any
) -> None:
    assert function(*arguments) == value


@pytest.mark.parametrize(
    "text",
    [
        "\u6211\u4eec\u53bb\u516c\u56ed\u6563\u6b65\uff0c\u5929\u6c14\u5f88\u597d\u3002",
        "\u5c0f\u660e\u7855\u58eb\u6bd5\u4e1a\u4e8e\u4e2d\u56fd\u79d1\u5b66\u9662 Phone-Booth 3.5%\r\n\t(14306)",
        # Names that are in no dictionary.
        "\u674e\u5c0f\u798f\u662f\u521b\u65b0\u529e\u4e3b\u4efb\u4e5f\u662f\u4e91\u8ba1\u7b97\u65b9\u9762\u7684\u4e13\u5bb6",
    ],
)
def test_texts_are_cut_as_by_jieba_itself(theirs: jieba.Tokenizer, text: str) -> None:
    assert words(text, "")[0] == theirs.lcut(text)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> jieba.Tokenizer:
    tokenizer = jieba.Tokenizer()
    tokenizer.tmp_dir = str(tmp_path_factory.mktemp("jieba"))
    return tokenizer


@pytest.mark.slow
def test_the_dictionary_is_read_in_silence_and_no_copy_is_kept_or_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A copy by which the second and the third character are a word.
    poisoned = {"\u516c": 1, "\u56ed": 0, "\u56ed\u6563": 1000, "\u6b65": 1}
    (tmp_path / "jieba.cache").write_bytes(marshal.dumps((poisoned, 1002)))
    text_scores._jieba.cache_clear()
    assert words("\u516c\u56ed\u6563\u6b65", "")[0] == ["\u516c\u56ed", "\u6563\u6b65"]
    assert [file.name for file in tmp_path.iterdir()] == ["jieba.cache"]
    assert capfd.readouterr() == ("", "")


@given(FULL, FULL)
def test_bleu_is_that_of_sacrebleu(answer: list[str], right: list[str]) -> None:
    reference = BLEU(
        smooth_method="none", tokenize="none", max_ngram_order=4, effective_order=False
    )
    wanted = reference.corpus_score([" ".join(answer)], [[" ".join(right)]]).score / 100
    assert bleu(answer, right) == pytest.approx(wanted, abs=1e-9)


def test_blanks_and_marks_are_words_where_a_text_is_chinese() -> None:
    answer, right = "\u516c\u56ed \u6563\u6b65", "\u516c\u56ed \u5929\u6c14"
    answer_words, other = words(answer, right)
    assert (answer_words, other) == (
        ["\u516c\u56ed", " ", "\u6563\u6b65"],
        ["\u516c\u56ed", " ", "\u5929\u6c14"],
    )
    scores = read_scores(answer, right)
    assert scores["precision"] == scores["recall"] == pytest.approx(2 / 3)
    assert scores["meteor"] == pytest.approx(2 / 3 * (1 - 0.5 / 8))


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


@pytest.mark.sampled
@pytest.mark.parametrize(
    "answer", ["", " \n\t", "x" * 100_000, "word " * 20_000, "\u4eca" * 10_000, "\ud800"]
)
def test_odd_answers_raise_nothing(answer: str) -> None:
    scores = read_scores(answer, "one two three four five")
    assert all(0 <= value <= 1 for value in scores.values())
    assert scores["precision"] == 0
