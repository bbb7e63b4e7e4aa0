"""Texts compared as words: shares of words, BLEU, and METEOR without synonyms."""

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

#: One character of it makes a text Chinese.
CHINESE = re.compile("[\u4e00-\u9fa5]")
#: Blanks, brackets and commas, Chinese ones too.
SCENE_GAPS = re.compile(r"[\uff08\uff09()\uff0c,\s]+")


def words(said: str, right: str) -> tuple[list[str], list[str]]:
    """Return the words of two texts: what stands between blanks, or as jieba cuts both where either is Chinese.

    jieba's blanks and marks are words, too. Cost: O(n), but O(n^2) in a run of characters that are in no word it knows.
    """
    if CHINESE.search(said) or CHINESE.search(right):
        cut = _jieba().lcut
        return cut(said), cut(right)
    return said.split(), right.split()


def shares(said: Sequence[str], right: Sequence[str]) -> tuple[float, float, float]:
    """Return precision, recall and F1 of the sets of words."""
    one, other = set(said), set(right)
    common = len(one & other)
    precision = common / len(one) if one else 0.0
    recall = common / len(other) if other else 0.0
    both = precision + recall
    return precision, recall, 2 * precision * recall / both if both else 0.0


def bleu(said: Sequence[str], right: Sequence[str]) -> float:
    """Return BLEU of one answer, up to four words, not smoothed: next to nothing where no four words agree."""
    if not said:
        return 0.0
    with warnings.catch_warnings():
        # It says so each time no four words agree.
        warnings.simplefilter("ignore")
        return float(sentence_bleu([list(right)], list(said)))


def meteor(said: Sequence[str], right: Sequence[str]) -> float:
    """Return METEOR of words that agree, or whose stems do; synonyms would need WordNet's data.

    Agrees with nltk's where WordNet knows no synonym. Cost: O(n log n).
    """
    matches, left = _matched([word.lower() for word in said], [word.lower() for word in right])
    stem = PorterStemmer().stem
    rest, other = ({place: stem(word) for place, word in part.items()} for part in left)
    matches |= _paired(rest, other)[0]
    count = len(matches)
    if not count:
        return 0.0
    precision, recall = count / len(said), count / len(right)
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    order = sorted(matches.items())
    breaks = sum(later != (earlier[0] + 1, earlier[1] + 1) for earlier, later in pairwise(order))
    return float(mean * (1 - 0.5 * ((breaks + 1) / count) ** 3.0))


def read_scores(said: str, right: str) -> dict[str, float]:
    """Return all scores of a text that was read, as Ocean-OCR defines them. Edit distance: 0 is equal."""
    one, other = words(said, right)
    precision, recall, f1 = shares(one, other)
    return {
        "edit_distance": normalised_distance(said, right),
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "bleu": bleu(one, other),
        "meteor": meteor(one, other),
    }


@cache
def _jieba() -> Tokenizer:
    """Return jieba with its own dictionary. Cost: a second, once in a process.

    By itself it would keep a copy among the temporary files, where whoever uses this machine may have put another one,
    and print that it does so.
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
    said: Sequence[str], right: Sequence[str]
) -> tuple[dict[int, int], tuple[dict[int, str], dict[int, str]]]:
    return _paired(dict(enumerate(said)), dict(enumerate(right)))


def _paired(
    said: dict[int, str], right: dict[int, str]
) -> tuple[dict[int, int], tuple[dict[int, str], dict[int, str]]]:
    """Pair equal words from the end on, each with the last that is free; return the pairs and what is left."""
    free: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place in sorted(right):
        free[right[place]].append(place)
    pairs = {
        place: free[said[place]].pop()
        for place in sorted(said, reverse=True)
        if free.get(said[place])
    }
    taken = set(pairs.values())
    return pairs, (
        {place: word for place, word in said.items() if place not in pairs},
        {place: word for place, word in right.items() if place not in taken},
    )


def read_label(text: str, scene: bool, one_line: bool) -> str:
    """Return a text as Ocean-OCR compares it.

    Of `scene` texts, which have no order, the words are sorted; of handwriting (`one_line`) line ends are blanks.
    """
    if scene:
        for mark, instead in (("\\text{", ""), ("}", ""), ("\n", " "), ("-", " "), ("*", " ")):
            text = text.replace(mark, instead)
        return " ".join(sorted(part for part in SCENE_GAPS.split(text.strip()) if part))
    return text.replace("*", " ").replace("\n", " ") if one_line else text
