"""Scores of an answer's text against references: edit distance, overlap of words, short answers, grounded text."""

from __future__ import annotations

import re
import string
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from nltk.metrics.scores import f_measure, precision, recall
from nltk.translate.bleu_score import sentence_bleu
from nltk.translate.meteor_score import single_meteor_score
from rapidfuzz.distance import Levenshtein

from espalier.harness.evaluation.scoring.choices import holds_words

if TYPE_CHECKING:
    from jieba import Tokenizer


def normalised_distance(first: str, second: str) -> float:
    """Return the edit distance divided by the longer length: 0 for equal texts, 1 if nothing matches.

    Two empty texts are equal. Cost: O(m n / 64).
    """
    return float(Levenshtein.normalized_distance(first, second))


def window_distance(part: str, text: str, below: float) -> float:
    """Return the smallest edit distance of `part` to a window of its length in `text`, divided by that length.

    A value of at least `below` becomes 1. Cost: O(len(text) len(part)^2 / 64).
    """
    length, limit = len(part), below * len(part)
    if not length or length > len(text):
        return 1.0
    best = length
    for start in range(len(text) - length + 1):
        # Beyond the cut-off it is the cut-off plus one.
        distance = Levenshtein.distance(part, text[start : start + length], score_cutoff=best)
        best = min(best, distance)
    return best / length if best < limit else 1.0


@dataclass(frozen=True)
class NearMatch:
    """A near match: its start in the text, and its number of edits."""

    start: int
    edits: int


def near_matches(pattern: str, text: str, edits: int) -> list[NearMatch]:
    """Return the matches of `pattern` in `text` with at most `edits` insertions, deletions and substitutions.

    Of overlapping matches the best counts; of equally good ones the first. Cost: O(n) steps on integers of m bits.
    """
    if not pattern:
        return []
    if not edits:
        # Matches of a look-ahead may overlap.
        exact = re.finditer(f"(?={re.escape(pattern)})", text)
        return [NearMatch(match.start(), 0) for match in exact]
    # Read backwards, the end of a match is its start.
    backwards = _ends(pattern[::-1], text[::-1])
    starts = [
        NearMatch(len(text) - end, cost)
        for end, cost in enumerate(backwards)
        if end and cost <= edits
    ]
    best: list[NearMatch] = []
    last = -len(pattern)
    for place in reversed(starts):
        if place.start - last >= len(pattern) - edits:
            best.append(place)
        elif place.edits < best[-1].edits:
            best[-1] = place
        last = max(place.start, last)
    return best


def _ends(pattern: str, text: str) -> Sequence[int]:
    """Return for each prefix of `text` the smallest distance of `pattern` to a substring that ends there.

    The bits of two integers hold the differences within one column of the dynamic-programming table (G. Myers, A fast
    bit-vector algorithm for approximate string matching, 1999).
    """
    every = (1 << len(pattern)) - 1
    top = 1 << (len(pattern) - 1)
    where: dict[str, int] = {}
    for place, letter in enumerate(pattern):
        where[letter] = where.get(letter, 0) | 1 << place
    up, down, cost = every, 0, len(pattern)
    costs = [cost]
    for letter in text:
        equal = where.get(letter, 0)
        diagonal = (((equal & up) + up) ^ up) | equal | down
        grow = down | (every & ~(diagonal | up))
        shrink = up & diagonal
        cost += bool(grow & top) - bool(shrink & top)
        grow, shrink = (grow << 1) & every, (shrink << 1) & every
        up = shrink | (every & ~(diagonal | grow))
        down = grow & diagonal
        costs.append(cost)
    return costs


#: Signs at the ends of an answer that do not count.
ENDS = string.punctuation + string.whitespace + "。、·\u201c\u201d\u2018\u2019"

#: ANLS of answers that are farther from the reference than this is 0 (DocVQA, arXiv 2007.00398).
FARTHEST = 0.5


def plain_answer(text: str) -> str:
    """Return a text in small letters, with single blanks, without punctuation at its ends."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    # A text of signs alone is itself.
    return " ".join(words).strip(ENDS) or " ".join(words)


def equal(answer: str, reference: str) -> bool:
    """Return whether two texts are equal but for case, blanks and punctuation at the ends."""
    return plain_answer(answer) == plain_answer(reference)


def contains(answer: str, reference: str) -> bool:
    """Return whether an answer contains a reference as whole words; case and blanks do not count."""
    return holds_words(plain_answer(answer), plain_answer(reference))


def anls(answer: str, reference: str) -> float:
    """Return one minus the normalised edit distance of two texts in small letters, 0 below a half."""
    texts = (" ".join(text.strip().lower().split()) for text in (answer, reference))
    distance = normalised_distance(*texts)
    return 1 - distance if distance < FARTHEST else 0.0


def within(number: float, reference: float, relative: float, absolute: float) -> bool:
    """Return whether a number is within a tolerance of its reference, both ends included.

    Args:
        number: of the answer.
        reference: the right one.
        relative: share of the reference's size.
        absolute: in the reference's unit; the larger tolerance counts.
    """
    tolerance = max(relative * abs(reference), absolute)
    # Decimal fractions have rounding errors as binary numbers.
    return abs(number - reference) <= tolerance + 1e-9 * max(1.0, abs(reference))


#: Chinese characters: a text with one of them is Chinese.
CHINESE = re.compile("[\u4e00-\u9fa5]")
#: Blanks, brackets and commas, including Chinese ones.
SCENE_GAPS = re.compile(r"[\uff08\uff09()\uff0c,\s]+")


def words(answer: str, reference: str) -> tuple[list[str], list[str]]:
    """Return the words of two texts, split at blanks, or by jieba if either text is Chinese.

    jieba returns blanks and punctuation as words. Cost: O(n), but O(n^2) in a run of characters outside its dictionary.
    """
    cut = _jieba().lcut if CHINESE.search(answer) or CHINESE.search(reference) else str.split
    return cut(answer), cut(reference)


def shares(answer: Sequence[str], reference: Sequence[str]) -> tuple[float, float, float]:
    """Return precision, recall and F1 of the sets of words."""
    sets = set(reference), set(answer)
    return precision(*sets) or 0.0, recall(*sets) or 0.0, f_measure(*sets) or 0.0


def bleu(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Return BLEU-4 of one answer, not smoothed: almost zero without a common 4-gram."""
    if not answer:
        return 0.0
    with warnings.catch_warnings():
        # nltk warns each time there is no common 4-gram.
        warnings.simplefilter("ignore")
        return float(sentence_bleu([list(reference)], list(answer)))


def meteor(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Return METEOR with matches of words and stems. Cost: O(n log n)."""
    return float(single_meteor_score(reference, answer, wordnet=_NoSynonyms()))


class _NoSynonyms:
    """Replaces WordNet, for which nltk needs data."""

    def synsets(self, word: str) -> tuple[()]:
        """Return nothing."""
        return ()


def read_scores(answer: str, reference: str) -> dict[str, float]:
    """Return all scores of a read text, as Ocean-OCR defines them. Edit distance: 0 is equal."""
    answer_words, reference_words = words(answer, reference)
    share_right, share_found, f1 = shares(answer_words, reference_words)
    return {
        "edit_distance": normalised_distance(answer, reference),
        "f1": f1,
        "precision": share_right,
        "recall": share_found,
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


def read_label(text: str, scene: bool, one_line: bool) -> str:
    """Return a text as Ocean-OCR compares it.

    The words of `scene` texts, which have no order, are sorted; in handwriting (`one_line`) line ends become blanks.
    """
    if scene:
        for mark, instead in (("\\text{", ""), ("}", ""), ("\n", " "), ("-", " "), ("*", " ")):
            text = text.replace(mark, instead)
        return " ".join(sorted(part for part in SCENE_GAPS.split(text.strip()) if part))
    return text.replace("*", " ").replace("\n", " ") if one_line else text


MARK = re.compile(r"<\|ref\|>(.*?)<\|/ref\|><\|det\|>.*?<\|/det\|>[ \t]*\n?", re.DOTALL)
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def plain_markdown(answer: str) -> str:
    r"""Return an answer without the boxes that the model writes before each block.

    A picture becomes a markdown picture on its own line; other marks are removed with their line. `\coloneqq` and
    `\eqqcolon`, which few renderers know, are replaced by `:=` and `=:`. Other answers are unchanged.
    """
    answer = MARK.sub(
        lambda mark: "![](picture)\n" if mark.group(1).strip() == "image" else "",
        answer.replace(END, ""),
    )
    return answer.replace("\\coloneqq", ":=").replace("\\eqqcolon", "=:").strip()
