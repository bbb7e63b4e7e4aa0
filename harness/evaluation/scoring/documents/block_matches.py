"""Match the blocks of an answer to the blocks of a page, as OmniDocBench's quick match does."""

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

#: Below this distance a block counts as found.
FOUND = 0.25
#: Largest distance of a block to a part of a longer one of the answer.
WITHIN = 0.4
#: Largest distance of a pair in the first assignment.
APART = 0.7
#: Approximate nanoseconds that comparing windows may take; on larger pages blocks are paired one to one.
WORK = 10_000_000_000


@dataclass(frozen=True)
class BlockMatch:
    """Blocks of the page, and the matching blocks of the answer (none: they are missing)."""

    page: tuple[int, ...]
    answer: tuple[int, ...]


def distances(page: Sequence[str], answer: Sequence[str]) -> np.ndarray:
    """Return the normalised edit distances of all pairs of texts, shape (page, answer)."""
    if not page or not answer:
        return np.zeros((len(page), len(answer)))
    return cdist(list(page), list(answer), scorer=Levenshtein.normalized_distance, dtype=np.float64)


def one_to_one(page: Sequence[str], answer: Sequence[str]) -> list[BlockMatch]:
    """Pair texts with the smallest total distance; other texts of the page are missing."""
    rows, columns = linear_sum_assignment(distances(page, answer))
    partner = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return [
        BlockMatch((place,), (partner[place],) if place in partner else ())
        for place in range(len(page))
    ]


def quick_match(page: Sequence[str], answer: Sequence[str]) -> list[BlockMatch]:
    """Pair the texts of a page with those of an answer; neither list holds empty texts.

    Neighbours in the answer are joined if that brings them nearer to a block without a close partner. Then blocks are
    paired one to one, and a block without a partner is searched within longer texts of the answer, which several blocks
    may share. The remaining texts of both sides are paired at any distance; further texts of the answer are ignored,
    further blocks of the page are missing.

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
        # A block found in an earlier text stays with that text; this one counts as used.
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
    """Return the blocks of each group of the answer, and the blocks without a group near enough."""
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
    """Return for each text of the answer the `unmatched` blocks that it contains."""
    inside_text: dict[int, list[int]] = {}
    for place, text in enumerate(answer):
        inside = [
            block for block in unmatched if window_distance(page[block], text, WITHIN) < WITHIN
        ]
        if inside:
            inside_text[place] = inside
    return inside_text


def _work(page: Iterable[str], answer: Sequence[str]) -> int:
    """Return the nanoseconds of all windows of all pairs: a call, and one for 64 cells of its table."""
    sizes = [len(text) for text in answer]
    return sum(
        (abs(len(block) - size) + 1) * (250 + min(len(block), size) ** 2 // 64)
        for block in page
        for size in sizes
    )
