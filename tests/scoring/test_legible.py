"""What says nothing: no word outside of special tokens, or a loop."""

from __future__ import annotations

import pytest

from espalier.harness.evaluation.scoring.choices import has_words, is_brief, is_legible

TEXTS = [
    *(
        "yes",
        "B",
        "12",
        "\u9ec4\u8272",
        "a red car",
        "<p>red</p>",
        "no no",
        "ha ha ha",
        "Mississippi",
    ),
    *(
        "1,200",
        "The quick brown fox jumps over the lazy dog and does not mind at all. " * 3,
    ),
]
LOOPS = ["zorp " * 4, "a b c " * 20, "\u54c8" * 30, "no, " * 8]
EMPTY = [
    "",
    " \n",
    "; ; ;",
    "<|im_end|></s>",
    "<loc_16> ; <loc_3>",
    "[PAD][PAD]",
    "\ufffd\ufffd",
    "...",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_legible(text: str) -> None:
    assert is_legible(text)


@pytest.mark.parametrize("text", EMPTY + LOOPS)
def test_signs_special_tokens_and_loops_are_not(text: str) -> None:
    assert not is_legible(text)
    assert has_words(text) == (text in LOOPS)


def test_a_short_answer_is_legible_and_short() -> None:
    words = " ".join(f"w{number}" for number in range(31))
    assert is_legible(words)
    assert not is_brief(words)
    assert is_brief(words.rpartition(" ")[0])
