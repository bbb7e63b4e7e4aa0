"""What answers state: an option in any usual form, yes or no; nothing where that is unclear, or no word says it."""

from __future__ import annotations

from typing import Any

import pytest

from espalier.harness.evaluation.scoring.choices import (
    has_words,
    is_brief,
    is_legible,
    letter,
    lettered,
    yes_or_no,
)

OPTIONS = {"A": "root", "B": "stem", "C": "leaf", "D": "flower"}

STATE_B = [
    *(
        "Letter B",
        "B?",
        "B (stem)",
        "stem (B)",
        "## Answer\nB",
        "- B",
        "> B",
        "选项B",
        "我认为答案是B",
        "是B",
    ),
    *("Based on X, option B is correct", "It looks like option B", "The one labeled B", "Option b"),
    *(
        "The final answer is \\boxed{\\text{B. stem}}",
        "It cannot be A, so the answer is B.",
        "B, not A",
    ),
    *(
        "B",
        "B.",
        "(B)",
        "**B**",
        "B. stem",
        "B) stem",
        "B: stem",
        "(B) stem",
        "B.stem",
        "(B).",
        "B\n",
    ),
    *(
        "b",
        "b.",
        "(b)",
        "b) stem",
        "[B]",
        "<B>",
        "“B”",
        "B)",
        "B:",
        "\uff08B\uff09",
        "B - stem",
        "B— stem",
    ),
    *(
        "Answer: B",
        "The answer is B.",
        "The correct answer is (B).",
        "Final answer: B",
        "ANSWER: B",
    ),
    *(
        "answer: b",
        "the answer is b",
        "The answer is (b)",
        "The answer is 'B'.",
        'The answer is "B"',
    ),
    *("**Answer:** B", "**Answer: B**", "The best answer is: B. stem", "<answer>B</answer>"),
    *(
        "The answer is option B",
        "The answer to this question is B.",
        "My answer would be B",
        "answer B",
    ),
    *("Option B", "Option B is correct.", "option (B)", "The correct choice is B", "Choice: B"),
    *(
        "Best option: (B",
        "the correct one is B",
        "The letter is B",
        "I choose B",
        "It is B.",
        "It's B",
    ),
    *("I would go with B.", "Therefore, B", "So it is B.", "I think the answer is B"),
    *("\\boxed{B}", "$\\boxed{\\text{B}}$", "stem", "Stem.", "The stem", "a stem", "It is a stem."),
    *(
        "答案\uff1aB。",
        "答案是B",
        "答案是 B。",
        "选B",
        "选择B",
        "正确答案是B",
        "正确选项是B。",
        "应选B。",
        "B是正确的",
    ),
    *(
        "La réponse est B",
        "Die Antwort ist B.",
        "La respuesta es B",
        "Ответ: B",
        "정답은 B",
        "答えはB",
    ),
    *(
        "B\n\nExplanation: A is a root.",
        "B\nbecause",
        "B because it is green",
        "B, because A is wrong",
    ),
    *("A stem is drawn, so the answer is B.", "The correct option is B because A is a root."),
    *(
        "B is right, A is wrong",
        "(B) stem, not (A) root",
        "B it is",
        "Because C is a ship, it is B.",
    ),
    *(
        "A root would be thicker. So B.",
        "Not A. The answer is B.",
        "I'm not sure, but the answer is B",
    ),
    *("B. stem\n\nIt is the stem, not (A) root.", "A. root\nB. stem\nThe answer is B."),
]

STATE_NONE = [
    *(
        "B is wrong",
        "B is not correct",
        "A or maybe B",
        "Option A or option B",
        "None of A, B, C, D",
    ),
    *(
        "It could be A, it could be B",
        "I'm torn between A and B",
        "The answer cannot be A",
        "A和B都对",
    ),
    *(
        "Choose A, B, C or D",
        "A. root, B. stem, C. leaf, D. flower",
        "D. H. Lawrence, not C. S. Lewis",
    ),
    *(
        "",
        "  \n",
        "Cannot tell",
        "I cannot tell",
        "Dunno",
        "Not sure",
        "Nothing can be said",
        "不知道",
    ),
    *(
        "无法判断",
        "I do not know",
        "None",
        "None of the above",
        "All of the above",
        "Both seem right",
    ),
    *("Both A and B", "A or B", "A and B", "(A) and (B)", "A, B", "A, B and C", "A/B", "AB", "ABC"),
    *(
        "The answer is A or B",
        "The answer is both A and B.",
        "Either B or C",
        "Neither A nor B",
        "答案是A和B",
    ),
    *("Can't decide between A and B", "A. root\nB. stem\nC. leaf\nD. flower", "(A) root (B) stem"),
    *("A: root, B: stem", "Option A is a root. Option C is a leaf.", "root or stem"),
    *(
        "A square is drawn",
        "a square",
        "The image shows a square.",
        "A nice picture",
        "A person, a dog",
    ),
    *(
        "not B",
        "It is not B.",
        "Definitely not B",
        "I don't think it is B",
        "The answer is not B",
        "不是B",
    ),
    *(
        "The answer B is wrong",
        "The incorrect option is B",
        "It is not a stem",
        "Could be a leaf or a flower",
    ),
    *("I cannot tell whether it is a root", "The answer is unclear", "Answer:", "Answer: unknown"),
    *(
        "E",
        "42",
        "Apple",
        "Dog",
        "Car",
        "Because",
        "Certainly!",
        "Anything",
        "D'accord",
        "c'est la vie",
    ),
    *("C-shaped", "Vitamin C", "Based on the picture", "Option"),
]

STATE_YES = [
    *("Yeah", "Yes; there is one", "Yes\n\nBecause no dog", "A: Yes", "I would say yes."),
    *(
        "Yes",
        "yes.",
        "Yes!",
        "YES",
        "y",
        "Y.",
        "yes\n",
        "**Yes**",
        '"Yes"',
        "(yes)",
        "\\boxed{Yes}",
    ),
    *("Answer: yes", "Final answer: Yes", "The answer is yes.", "I think yes.", "Normally yes"),
    *("Yes, there is.", "Yes there is a dog", "Yes, I can see it", "Yes, there is no doubt"),
]

STATE_NO = [
    *("No", "no.", "No!", "NO", "n", "no\n", "**No**", "Answer: no", "The answer is no."),
    *("No, there isn't", "No there is not", "No, I cannot see one", "Answer: No, it is not"),
    *("There is no dog.", "There isn't any"),
]

UNCLEAR = [
    *(
        "No one knows",
        "Could be yes",
        "yes | no",
        "Yes?No?",
        "Neither yes nor no",
        "Hard to say, yes",
    ),
    *("", "Not sure", "Nothing can be said", "Now that is hard", "I cannot tell from this image."),
    *(
        "Yes and no",
        "yes or no",
        "Yes/No",
        "yes, no",
        "Yes. No.",
        "No idea",
        "No way to tell",
        "no answer",
    ),
    *(
        "maybe",
        "Unknown",
        "I don't know",
        "It is not clear",
        "It depends",
        "There is no way to tell",
    ),
    *("I have no idea", "I'm not sure, yes?", "No, I cannot tell", "Both", "A dog"),
    *("north", "yesterday", "noon", "None", "Note that", "nobody"),
]


HEDGES = lettered(["yes", "no", "not sure", "none of the above"])
CHINESE = lettered(["黄色", "绿色"])

#: Answers, options, and the letter that is stated.
LETTERS = [
    *((answer, OPTIONS, "B") for answer in STATE_B),
    *((answer, OPTIONS, "") for answer in STATE_NONE),
    # An A that is no article is an option.
    *((answer, OPTIONS, "A") for answer in ("A", "a", "A.", "A is right", "The answer is A")),
    *((answer, OPTIONS, "A") for answer in ("A: root", "A. root", "A because")),
    # Without texts letters alone count.
    *((answer, "ABCD", "") for answer in ("E", "stem", "The stem", "E. none of these")),
    ("B. stem", "ABCD", "B"),
    # An option may say what is else a hedge.
    *(("Not sure", HEDGES, "C"), ("None of the above.", HEDGES, "D")),
    *(("No", HEDGES, "B"), ("yes", HEDGES, "A")),
    # Chinese options are read by their texts.
    *((answer, CHINESE, "B") for answer in ("绿色", "是绿色。", "选B", "正确答案是B。")),
    *((answer, CHINESE, "") for answer in ("是绿色或者黄色", "不是绿色")),
]


@pytest.mark.parametrize(("answer", "options", "stated"), LETTERS)
def test_the_letter_that_an_answer_states(answer: str, options: Any, stated: str) -> None:
    assert letter(answer, options) == stated


def test_options_that_are_not_there_have_no_letter() -> None:
    assert lettered(["root", None, "nan", float("nan"), "", 5]) == {"A": "root", "F": "5"}


@pytest.mark.parametrize(
    ("answer", "stated"),
    [
        *((answer, "yes") for answer in STATE_YES),
        *((answer, "no") for answer in STATE_NO),
        *((answer, "") for answer in UNCLEAR),
    ],
)
def test_yes_and_no(answer: str, stated: str) -> None:
    assert yes_or_no(answer) == stated


#: Texts, and what says nothing: no word outside of special tokens, or a loop.
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
