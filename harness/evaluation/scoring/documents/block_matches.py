"""Match the blocks of an answer to the blocks of a page, as OmniDocBench's quick match does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from scipy.optimize import linear_sum_assignment

from espalier.harness.evaluation.scoring.text_scores import window_distance

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
    sought = unmatched
    for place, text in enumerate(answer):
        inside = [block for block in sought if window_distance(page[block], text, WITHIN) < WITHIN]
        if inside:
            # A block found in an earlier text stays with that text; this one counts as used.
            partners[(place,)] += [block for block in inside if block in unmatched]
            unmatched = [block for block in unmatched if block not in inside]
    pairs = [
        BlockMatch(tuple(sorted(blocks)), group) for group, blocks in partners.items() if blocks
    ]
    used = {place for group in partners for place in group}
    unused = [place for place in range(len(answer)) if place not in used]
    left = one_to_one([page[block] for block in unmatched], [answer[place] for place in unused])
    return pairs + [
        BlockMatch(
            tuple(unmatched[block] for block in pair.page),
            tuple(unused[block] for block in pair.answer),
        )
        for pair in left
    ]


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


def _work(page: Iterable[str], answer: Sequence[str]) -> int:
    """Return the nanoseconds of all windows of all pairs: a call, and one for 64 cells of its table."""
    sizes = [len(text) for text in answer]
    return sum(
        (abs(len(block) - size) + 1) * (250 + min(len(block), size) ** 2 // 64)
        for block in page
        for size in sizes
    )


#: Largest distance of a part to a substring of its block.
PART = 0.6

#: Neighbours, and their distance to their block when joined.
Run = tuple[tuple[int, ...], float]
#: Returns whether a part is nearly a substring of a block.
Stretch = Callable[[str, str], bool]


def merged(page: Sequence[str], answer: Sequence[str], close: np.ndarray) -> list[tuple[int, ...]]:
    """Return all positions of the answer in order, grouped where several make one block.

    Only blocks and texts without a close partner (`close`, shape (page, answer)) take part.
    """
    free = [place for place in range(len(answer)) if not close[:, place].any()]
    runs: list[Run] = []
    # The same neighbours are compared from each start.
    stretch = cache(lambda part, block: window_distance(part, block, PART) < PART)
    for block in np.flatnonzero(~close.any(axis=1)).tolist():
        tried = [_run(page[block], answer, start, set(free), stretch) for start in free]
        if tried:
            runs.append(min(tried, key=lambda run: run[1]))
    groups = {place: places for places, _ in _disjoint(runs) for place in places}
    return list(dict.fromkeys(groups.get(place, (place,)) for place in range(len(answer))))


def _run(block: str, answer: Sequence[str], start: int, free: set[int], stretch: Stretch) -> Run:
    """Return the neighbours from `start` on, as long as each further one brings them nearer to the block."""
    run = [start]
    while run[-1] + 1 in free:
        longer = [*run, run[-1] + 1]
        if not _belongs([answer[place] for place in longer], block, stretch):
            break
        run = longer
        if len(" ".join(answer[place] for place in run)) > len(block):
            break
    text = " ".join(answer[place] for place in run)
    return tuple(run), float(Levenshtein.normalized_distance(block, text))


def _belongs(parts: Sequence[str], block: str, stretch: Stretch) -> bool:
    """Return whether the last part brings the others nearer to the block, and all are nearly substrings of it."""
    without, together = " ".join(parts[:-1]), " ".join(parts)
    nearer = Levenshtein.normalized_distance(block, together) <= Levenshtein.normalized_distance(
        block, without
    )
    return nearer and all(stretch(part, block) for part in parts)


def _disjoint(runs: Sequence[Run]) -> list[Run]:
    """Return disjoint runs: of overlapping ones, the choice with the smallest mean distance."""
    disjoint: list[Run] = []
    cluster: list[Run] = []
    for run in sorted(runs, key=lambda run: run[0][0]):
        if cluster and not any(set(run[0]) & set(earlier[0]) for earlier in cluster):
            disjoint += _nearest(cluster)
            cluster = []
        cluster.append(run)
    return disjoint + _nearest(cluster)


def _nearest(cluster: Sequence[Run]) -> list[Run]:
    """Return the best of the choices that start with one run and add every later run that fits."""
    choices: list[list[Run]] = []
    for run in cluster:
        fits = False
        for choice in choices:
            overlapping = next((member for member in choice if member[0] == run[0]), None)
            if overlapping is not None:
                fits = True
                if run[1] < overlapping[1]:
                    choice[choice.index(overlapping)] = run
            elif not any(set(run[0]) & set(member[0]) for member in choice):
                fits = True
                choice.append(run)
        if not fits:
            choices.append([run])
    return min(choices, key=lambda choice: sum(run[1] for run in choice) / len(choice), default=[])
