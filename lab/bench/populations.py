"""Populations with a known loss, to see how often an interval covers it: paired scores of two models on one sample.

`full` is what the unpruned model scores, `ours` what the pruned one does, and the loss is the share of the former's
mean that the latter lacks. What two runs of real models share is in them: most samples are scored alike, some break,
fewer mend, and many stand at full marks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, float], tuple[Array, Array]]


@dataclass(frozen=True)
class Population:
    """Where samples come from.

    Attributes:
        kind: binary, graded or corpus.
        name: what it is, in a few words.
        draw: from a generator, the number of samples and a loss the contributions (ours, full), each (n,).
        full: the unpruned model's true score.
    """

    kind: str
    name: str
    draw: Draw
    full: float


def binary(right: float, mended: float) -> Draw:
    """Return answers right or wrong: of the right ones the loss breaks, and as many more as are mended."""

    def draw(rng: np.random.Generator, n: int, loss: float) -> tuple[Array, Array]:
        broken = (loss * right + mended) / right
        full = rng.random(n) < right
        turn = rng.random(n)
        repaired = mended / (1 - right) if right < 1 else 0.0
        ours = np.where(full, turn >= broken, turn < repaired)
        return ours.astype(float), full.astype(float)

    return draw


def graded(perfect: float, sizes: str) -> Draw:
    """Return scores in [0, 1], a share of them 1, the rest Beta(4, 2).

    Args:
        perfect: share at full marks.
        sizes: of the losses: `parts` (a sample keeps a uniform share of its score), `whole` (it fails), `noise` (it
            fails, and every score that is not 1 moves by 0.05 either way).
    """

    def draw(rng: np.random.Generator, n: int, loss: float) -> tuple[Array, Array]:
        full = np.where(rng.random(n) < perfect, 1.0, 0.05 + 0.9 * rng.beta(4, 2, n))
        hit = rng.random(n) < (2 * loss if sizes == "parts" else loss)
        kept = rng.random(n) if sizes == "parts" else np.zeros(n)
        ours = full + (0.05 * rng.choice([-1, 1], n) * (full < 1) if sizes == "noise" else 0.0)
        return np.where(hit, kept * full, ours), full

    return draw


def f1(right: float, yes: float = 0.5, mended: float = 0.01) -> Draw:
    """Return contributions to an F1 of yes and no: of objects that are there some are no longer seen."""

    def draw(rng: np.random.Generator, n: int, loss: float) -> tuple[Array, Array]:
        present = rng.random(n) < yes
        answered = np.where(rng.random(n) < right, present, ~present)
        turn = rng.random(n)
        # Answers that change either way at random cost both models' scores alike; the loss is of hits alone.
        flip = turn < np.where(answered == present, mended * (1 - right) / right, mended)
        ours = np.where(
            present & answered, turn >= _missed(right, yes, loss), answered ^ (flip & ~present)
        )
        return f1_shares(ours, present), f1_shares(answered, present)

    return draw


def _missed(right: float, yes: float, loss: float) -> float:
    """Return the share of hits that must be missed for an F1 that is lower by `loss` of itself."""
    hits, wrong = yes * right, 1 - right
    goal = (1 - loss) * 2 * hits / (2 * hits + wrong)
    # 2 hits (1 - u) / (2 hits (1 - u) + wrong + hits u) = goal, solved for u.
    return (2 * hits - goal * (2 * hits + wrong)) / (2 * hits - goal * hits)


def f1_shares(answered: NDArray[np.bool_], present: NDArray[np.bool_]) -> Array:
    """Return what each answer contributes to F1 by leaving it out (harness/evaluation/sample_contributions.py)."""
    hits, odd = (answered & present).astype(float), (answered != present).astype(float)
    return _left_out(2 * hits, 2 * hits + odd)


def rate(wrong: float, failing: bool) -> Draw:
    """Return contributions to the share of words read right: pages of very different length.

    Args:
        wrong: share of words that the unpruned model reads wrong.
        failing: whether the loss is of whole pages, else of words here and there.
    """

    def draw(rng: np.random.Generator, n: int, loss: float) -> tuple[Array, Array]:
        words = 1 + rng.geometric(1 / 20, n)
        full = rng.binomial(words, 1 - wrong)
        lost = full * (rng.random(n) < loss) if failing else rng.binomial(full, loss)
        read = [(full - lost).astype(float), full.astype(float)]
        ours, unpruned = (_left_out(words_read, words.astype(float)) for words_read in read)
        return ours, unpruned

    return draw


def _left_out(above: Array, below: Array) -> Array:
    """Return the contributions to sum(above) / sum(below): all + (n - 1) (all - all without one), centred."""
    ratio = above.sum() / below.sum()
    others_below = below.sum() - below
    without = np.divide(
        above.sum() - above, others_below, out=np.full(len(above), ratio), where=others_below > 0
    )
    moved = (len(above) - 1) * (ratio - without)
    shares: Array = ratio + moved - moved.mean()
    return shares


def _f1(right: float, yes: float = 0.5) -> float:
    return 2 * yes * right / (2 * yes * right + 1 - right)


POPULATIONS: tuple[Population, ...] = (
    Population("binary", "all right", binary(1.0, 0.0), 1.0),
    Population("binary", "99 % right", binary(0.99, 0.002), 0.99),
    Population("binary", "80 % right, 3 % mended", binary(0.8, 0.03), 0.8),
    Population("binary", "50 % right, 5 % mended", binary(0.5, 0.05), 0.5),
    Population("graded", "all 1, parts lost", graded(1.0, "parts"), 1.0),
    Population("graded", "80 % at 1, parts lost", graded(0.8, "parts"), 0.8 + 0.2 * 0.65),
    Population("graded", "80 % at 1, whole samples lost", graded(0.8, "whole"), 0.8 + 0.2 * 0.65),
    Population("graded", "50 % at 1, noise, wholes lost", graded(0.5, "noise"), 0.5 + 0.5 * 0.65),
    Population("corpus", "F1, 99 % right", f1(0.99), _f1(0.99)),
    Population("corpus", "F1, 85 % right", f1(0.85), _f1(0.85)),
    Population("corpus", "words, some misread", rate(0.05, failing=False), 0.95),
    Population("corpus", "words, whole pages lost", rate(0.05, failing=True), 0.95),
)
