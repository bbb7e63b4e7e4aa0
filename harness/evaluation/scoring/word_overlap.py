"""Word overlap of texts: precision, recall, BLEU, and METEOR without synonyms."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from nltk.stem import PorterStemmer
from nltk.translate.bleu_score import sentence_bleu

from espalier.harness.evaluation.scoring.edit_distance import normalised_distance

if TYPE_CHECKING:
    from jieba import Tokenizer

#: Chinese characters: a text with one of them is Chinese.
CHINESE = re.compile("[\u4e00-\u9fa5]")
#: Blanks, brackets and commas, including Chinese ones.
SCENE_GAPS = re.compile(r"[\uff08\uff09()\uff0c,\s]+")


def words(answer: str, reference: str) -> tuple[list[str], list[str]]:
    """Return the words of two texts, split at blanks, or by jieba if either text is Chinese.

    jieba returns blanks and punctuation as words. Cost: O(n), but O(n^2) in a run of characters outside its dictionary.
    """
    if CHINESE.search(answer) or CHINESE.search(reference):
        cut = _jieba().lcut
        return cut(answer), cut(reference)
    return answer.split(), reference.split()


def shares(answer: Sequence[str], reference: Sequence[str]) -> tuple[float, float, float]:
    """Return precision, recall and F1 of the sets of words."""
    answer_words, reference_words = set(answer), set(reference)
    common = len(answer_words & reference_words)
    precision = common / len(answer_words) if answer_words else 0.0
    recall = common / len(reference_words) if reference_words else 0.0
    total = precision + recall
    return precision, recall, 2 * precision * recall / total if total else 0.0


def bleu(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Return BLEU-4 of one answer, not smoothed: almost zero without a common 4-gram."""
    if not answer:
        return 0.0
    with warnings.catch_warnings():
        # nltk warns each time there is no common 4-gram.
        warnings.simplefilter("ignore")
        return float(sentence_bleu([list(reference)], list(answer)))


def meteor(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Return METEOR with matches of words and stems; synonyms would need WordNet's data.

    It equals nltk's METEOR if WordNet knows no synonym. Cost: O(n log n).
    """
    matches, unmatched = _matched(
        [word.lower() for word in answer], [word.lower() for word in reference]
    )
    stem = PorterStemmer().stem
    answer_stems, reference_stems = (
        {place: stem(word) for place, word in part.items()} for part in unmatched
    )
    matches |= _paired(answer_stems, reference_stems)[0]
    count = len(matches)
    if not count:
        return 0.0
    precision, recall = count / len(answer), count / len(reference)
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    order = sorted(matches.items())
    breaks = sum(later != (earlier[0] + 1, earlier[1] + 1) for earlier, later in pairwise(order))
    return float(mean * (1 - 0.5 * ((breaks + 1) / count) ** 3.0))


def read_scores(answer: str, reference: str) -> dict[str, float]:
    """Return all scores of a read text, as Ocean-OCR defines them. Edit distance: 0 is equal."""
    answer_words, reference_words = words(answer, reference)
    precision, recall, f1 = shares(answer_words, reference_words)
    return {
        "edit_distance": normalised_distance(answer, reference),
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "bleu": bleu(answer_words, reference_words),
        "meteor": meteor(answer_words, reference_words),
    }


@cache
def _jieba() -> Tokenizer:
    """Return jieba with its own dictionary. Cost: a second, once in a process.

    By default jieba caches its dictionary among the temporary files, where another user may have put a different one,
    and prints that it does so.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in its patterns, and of how it finds its files
        # Only Chinese texts need it.
        from jieba import Tokenizer

        cutter = Tokenizer()
        cutter.FREQ, cutter.total = cutter.gen_pfdict(cutter.get_dict_file())
    cutter.initialized = True
    return cutter


def _matched(
    answer: Sequence[str], reference: Sequence[str]
) -> tuple[dict[int, int], tuple[dict[int, str], dict[int, str]]]:
    return _paired(dict(enumerate(answer)), dict(enumerate(reference)))


def _paired(
    answer: dict[int, str], reference: dict[int, str]
) -> tuple[dict[int, int], tuple[dict[int, str], dict[int, str]]]:
    """Pair equal words from the end, each with the last free one; return the pairs and the unpaired words."""
    free: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place in sorted(reference):
        free[reference[place]].append(place)
    pairs = {
        place: free[answer[place]].pop()
        for place in sorted(answer, reverse=True)
        if free.get(answer[place])
    }
    taken = set(pairs.values())
    return pairs, (
        {place: word for place, word in answer.items() if place not in pairs},
        {place: word for place, word in reference.items() if place not in taken},
    )


def read_label(text: str, scene: bool, one_line: bool) -> str:
    """Return a text as Ocean-OCR compares it.

    The words of `scene` texts, which have no order, are sorted; in handwriting (`one_line`) line ends become blanks.
    """
    if scene:
        for mark, instead in (("\\text{", ""), ("}", ""), ("\n", " "), ("-", " "), ("*", " ")):
            text = text.replace(mark, instead)
        return " ".join(sorted(part for part in SCENE_GAPS.split(text.strip()) if part))
    return text.replace("*", " ").replace("\n", " ") if one_line else text
