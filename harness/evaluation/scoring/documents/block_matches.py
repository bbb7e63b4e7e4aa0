"""Which blocks of an answer stand for which blocks of a page, as OmniDocBench's quick match pairs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from scipy.optimize import linear_sum_assignment

from espalier.harness.evaluation.scoring.documents.block_merges import merged
from espalier.harness.evaluation.scoring.edit_distance import window_distance

#: Below this a block counts as found, whatever else would fit.
FOUND = 0.25
#: A block within a longer one of the answer.
WITHIN = 0.4
#: A pair further apart is none yet.
APART = 0.7
#: Nanoseconds, about, that comparing windows may take; on larger pages blocks are paired one to one.
WORK = 10_000_000_000


@dataclass(frozen=True)
class BlockMatch:
    """Blocks of the page, and the blocks of the answer that stand for them (none: they are missing)."""

    page: tuple[int, ...]
    answer: tuple[int, ...]


def distances(page: Sequence[str], answer: Sequence[str]) -> np.ndarray:
    """Return the normalised edit distance of each text to each. Shape: (page, answer)."""
    if not page or not answer:
        return np.zeros((len(page), len(answer)))
    return cdist(list(page), list(answer), scorer=Levenshtein.normalized_distance, dtype=np.float64)


def one_to_one(page: Sequence[str], answer: Sequence[str]) -> list[BlockMatch]:
    """Pair texts so that the distances add up to the least; the rest of the page is missing."""
    rows, columns = linear_sum_assignment(distances(page, answer))
    partner = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return [
        BlockMatch((place,), (partner[place],) if place in partner else ())
        for place in range(len(page))
    ]


def quick_match(page: Sequence[str], answer: Sequence[str]) -> list[BlockMatch]:
    """Pair the texts of a page with those of an answer; neither list holds empty texts.

    Neighbours of the answer are joined where together they are nearer to a block that nothing else fits. Then blocks
    are paired one to one, and a block without a partner is looked for within longer texts of the answer: several blocks
    may share one. What is still left on both sides is paired, however far apart; what is left of the answer is not
    counted, what is left of the page is missing.

    Cost: O(pairs) edit distances, and windows for up to `WORK`.
    """
    if len(page) == 1 and len(answer) == 1:
        return [BlockMatch((0,), (0,))]
    if not page or not answer:
        return [BlockMatch((place,), ()) for place in range(len(page))]
    if _work(page, answer) > WORK:
        return one_to_one(page, answer)
    near = distances(page, answer)
    groups = merged(page, answer, near < FOUND)
    partners, unmatched = _assigned(page, answer, groups)
    for place, inside in _within(page, answer, unmatched).items():
        for block in inside:
            if block in unmatched:
                partners[(place,)].append(block)
        unmatched = [block for block in unmatched if block not in inside]
        # Looked for and found in an earlier text: that one is spoken for, not left over.
        partners[(place,)] = partners[(place,)]
    pairs = [
        BlockMatch(tuple(sorted(blocks)), group) for group, blocks in partners.items() if blocks
    ]
    used = {place for group in partners for place in group}
    unused = [place for place in range(len(answer)) if place not in used]
    for pair in one_to_one(
        [page[block] for block in unmatched], [answer[place] for place in unused]
    ):
        pairs.append(
            BlockMatch(
                tuple(unmatched[block] for block in pair.page),
                tuple(unused[block] for block in pair.answer),
            )
        )
    return pairs


def _assigned(
    page: Sequence[str], answer: Sequence[str], groups: Sequence[tuple[int, ...]]
) -> tuple[defaultdict[tuple[int, ...], list[int]], list[int]]:
    """Return the blocks of each group of the answer, and those without a group near enough."""
    far = distances(page, [" ".join(answer[place] for place in group) for group in groups])
    rows, columns = linear_sum_assignment(far)
    partners: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        if far[row, column] <= APART:
            partners[groups[column]].append(row)
    placed = {row for rows_of in partners.values() for row in rows_of}
    return partners, [row for row in range(len(page)) if row not in placed]


def _within(
    page: Sequence[str], answer: Sequence[str], unmatched: Sequence[int]
) -> dict[int, list[int]]:
    """Return for each text of the answer the blocks among `alone` that stand within it."""
    inside_text: dict[int, list[int]] = {}
    for place, text in enumerate(answer):
        inside = [
            block for block in unmatched if window_distance(page[block], text, WITHIN) < WITHIN
        ]
        if inside:
            inside_text[place] = inside
    return inside_text


def _work(page: Iterable[str], answer: Sequence[str]) -> int:
    """Return what all windows of all pairs would cost: a call, and a nanosecond for 64 cells of its table."""
    sizes = [len(text) for text in answer]
    return sum(
        (abs(len(block) - size) + 1) * (250 + min(len(block), size) ** 2 // 64)
        for block in page
        for size in sizes
    )
