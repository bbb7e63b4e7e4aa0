"""CIDEr against the metric's formula and pycocoevalcap's whole procedure; detailed descriptions."""

from __future__ import annotations

import math
import random
import re
import string
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from lmms_eval.tasks.nocaps.utils import nocaps_aggregation_result

from espalier.tasks.captions import dense, task
from espalier.tasks.captions.consensus import cider, tokenized

WORDS = (
    *("a", "the", "red", "blue", "dog", "cat", "runs", "sits"),
    *("on", "under", "grass", "table", "with", "two", "old", "small"),
)
Sample = dict[str, Any]


def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def slow_cider(samples: list[tuple[str, list[str]]]) -> float:
    """CIDEr-D as its paper has it: clipped tf-idf cosine of 1 to 4 words, a Gaussian of the lengths, times 10."""
    seen: Counter[tuple[str, ...]] = Counter()
    for _, references in samples:
        seen.update({ngram for text in references for n in range(1, 5) for ngram in grams(text, n)})
    weight = {ngram: math.log(len(samples)) - math.log(count) for ngram, count in seen.items()}

    def vector(text: str, n: int) -> dict[tuple[str, ...], float]:
        rare = math.log(len(samples))
        return {ngram: count * weight.get(ngram, rare) for ngram, count in grams(text, n).items()}

    def alike(answer: str, reference: str, n: int) -> float:
        ours, theirs = vector(answer, n), vector(reference, n)
        product = sum(
            min(value, theirs.get(words, 0.0)) * theirs.get(words, 0.0)
            for words, value in ours.items()
        )
        norms = [math.sqrt(sum(x * x for x in words.values())) for words in (ours, theirs)]
        if not all(norms):
            return 0.0
        # The released metric counts pairs of words, one fewer than words, on both sides.
        apart = max(len(answer.split()) - 1, 0) - max(len(reference.split()) - 1, 0)
        return product / (norms[0] * norms[1]) * math.exp(-(apart**2) / (2 * 6.0**2))

    return sum(
        10 * sum(alike(answer, reference, n) for reference in references for n in range(1, 5)) / 4 / len(references)
        for answer, references in samples
    ) / len(samples)  # fmt: skip


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))


def made(seed: int, count: int = 6) -> list[Sample]:
    rng = random.Random(seed)
    return [
        {
            "answer": rng.choice(["", sentence(rng), sentence(rng)]),
            "references": [sentence(rng) for _ in range(rng.randint(1, 5))],
        }
        for _ in range(count)
    ]


def plain(samples: list[Sample]) -> dict[str, str]:
    return {text: text for sample in samples for text in (sample["answer"], *sample["references"])}


@pytest.mark.parametrize("seed", range(20))
def test_the_metric_is_its_formula(seed: int) -> None:
    samples = made(seed)
    wanted = slow_cider([(sample["answer"], sample["references"]) for sample in samples])
    assert cider(samples, plain(samples)) == pytest.approx(wanted, abs=1e-9)


def test_a_worked_case() -> None:
    """Two samples without a word in common, so every word weighs log 2.

    Of the first answer's two words one is right: cosine of single words 1/2, of pairs and of longer pieces 0.
    """
    samples = [
        {"answer": "red cat", "references": ["red dog"]},
        {"answer": "blue table", "references": ["blue table"]},
    ]
    first = 10 * (1 / 2) / 4
    second = 10 * (1 + 1) / 4
    assert cider(samples, plain(samples)) == pytest.approx((first + second) / 2)


@pytest.mark.slow
def test_it_is_what_the_whole_procedure_of_pycocoevalcap_gives(tmp_path: Any) -> None:
    """Capitals, punctuation, line breaks; lmms-eval's aggregation goes through COCOEvalCap."""
    rng = random.Random(0)

    def dressed(text: str) -> str:
        return text.capitalize() + rng.choice([".", "!", ", isn't it?", "", " (left)"])

    samples = [
        {
            "answer": dressed(sample["answer"]),
            "references": [dressed(r) for r in sample["references"]],
        }
        for sample in made(1, 8)
    ]
    results = [
        {"answer": sample["references"], "pred": sample["answer"], "image_id": number}
        for number, sample in enumerate(samples)
    ]
    args = type("Args", (), {"output_path": str(tmp_path)})()
    assert task.consensus(samples) == pytest.approx(
        nocaps_aggregation_result(results, "CIDEr", args), abs=1e-9
    )


def test_captions_are_tokenized_line_by_line() -> None:
    captions = tokenized(["Two\ndogs, here.", "", "  ", "A\u2028B\x0bC\rD", "fin", "Ça va — été"])
    assert captions["Two\ndogs, here."] == "two dogs here"
    assert captions[""] == captions["  "] == ""
    assert (captions["A\u2028B\x0bC\rD"], captions["fin"]) == ("a b c d", "fin")
    assert tokenized([]) == {}


def test_a_task_tokenizes_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[set[str]] = []

    def note(texts: Any) -> dict[str, str]:
        batches.append(set(texts))
        return {text: text for text in batches[-1]}

    monkeypatch.setattr(task, "tokenized", note)
    captions = object.__new__(task.CaptionTask)
    captions._words = {}
    samples = made(2)
    assert captions.cider(samples) == pytest.approx(cider(samples, plain(samples)))
    assert captions.cider(samples[1:]) == pytest.approx(cider(samples[1:], plain(samples)))
    assert captions.cider([*samples[:2], samples[0]]) >= 0
    assert batches == [set(plain(samples)), set(), set()]


@pytest.mark.parametrize(
    ("results", "answer", "unparsed"),
    [(["a dog"], "a dog", 0), ([""], "", 1), ([], "", 1), ([None], "", 1), (["...\n"], "...\n", 1)],
)
def test_whatever_is_said_is_scored(results: list[Any], answer: str, unparsed: int) -> None:
    scores = task.process_results({"text": ["a dog"]}, results)
    assert scores == {"CIDEr": {"answer": answer, "references": ["a dog"]}, "unparsed": unparsed}


@pytest.mark.parametrize(
    ("read", "document", "line"),
    [
        (task.references, {"annotations_captions": []}, "no reference captions"),
        (task.doc_to_visual, {"image": None}, "no picture"),
        (dense.doc_to_visual, {"image": "x.jpg", "binary": None}, "x.jpg has no picture"),
        (
            partial(dense.process_results, results=["a dog"]),
            {"image": "x.jpg"},
            "x.jpg has no reference",
        ),
    ],
)
def test_a_sample_without_captions_or_picture_is_an_error(
    read: Callable[[Sample], Any], document: Sample, line: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        read(document)


@pytest.mark.parametrize(
    ("results", "rouge", "words", "unparsed"),
    [
        (["A dog runs."], 1.0, 3, 0),
        (["Two cats sleep, a dog runs"], 2 * 3 / 9, 6, 0),
        ([""], 0.0, 0, 1),
        ([], 0.0, 0, 1),
        (
            [string.punctuation],
            0.0,
            1,
            1,
        ),  # an underscore is a word to the metric, and says nothing
    ],
)
def test_descriptions_go_by_the_nearest_reference(
    results: list[Any], rouge: float, words: int, unparsed: int
) -> None:
    doc = {"GT_Caption_GPT4O": "a dog runs", "GT_Caption_GPT4V": "", "GT_Caption_Gemini15Pro": "it"}
    scores = dense.process_results(doc, results)
    assert scores == {"rouge_l": pytest.approx(rouge), "words": words, "unparsed": unparsed}
