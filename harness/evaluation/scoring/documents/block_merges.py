"""Merge neighbouring blocks of an answer that are one block of the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from rapidfuzz.distance import Levenshtein

from espalier.harness.evaluation.scoring.edit_distance import window_distance

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
    stretch = cache(_is_stretch)
    for block in np.flatnonzero(~close.any(axis=1)).tolist():
        tried = [_run(page[block], answer, start, set(free), stretch) for start in free]
        if tried:
            runs.append(min(tried, key=lambda run: run[1]))
    groups: list[tuple[int, ...]] = []
    joined = {run[0]: run for run in _disjoint(runs)}
    place = 0
    while place < len(answer):
        run = next((run for run in joined if run[0] == place), (place,))
        groups.append(run)
        place = run[-1] + 1
    return groups


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


def _is_stretch(part: str, block: str) -> bool:
    return window_distance(part, block, PART) < PART


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
