"""Edit distances of texts, and near matches of a text in a longer one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein


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
        distance = Levenshtein.distance(part, text[start : start + length], score_cutoff=best)
        if distance < best:
            best = distance
            if not best:
                break
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
        places = []
        at = text.find(pattern)
        while at >= 0:
            places.append(NearMatch(at, 0))
            at = text.find(pattern, at + 1)
        return places
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
