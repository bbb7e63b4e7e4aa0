"""Contributions of samples to an aggregate that is not a mean, by leave-one-out; their mean is the aggregate.

With G units (samples, or clusters of them), the influence of unit g is (G - 1) (all - all without g), the jackknife's
(Quenouille 1956, Tukey 1958), centred; a contribution is the aggregate plus the influence. The mean of contributions
is the aggregate, and their spread its standard error, if the aggregate is smooth in the weights of the samples: ratios,
F1, sums of group scores, CIDEr. It fails for medians and maxima, and for a handful of samples; so the contributions
must first predict the aggregates of random halves, which need no smoothness (Shao and Wu 1989). This test does not
detect a maximum set by an outlier: in halves it looks like the one wrong answer of many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Up to this number, units are left out one by one; more units are left out in blocks.
ALONE = 2000

#: Samples that all evaluations of an aggregate may process in total, beyond `ALONE` units.
VISITS = 10_000_000

#: Smallest number of blocks: a standard error from 200 blocks is known to 5 %.
BLOCKS = 200

#: Smallest number of units for which contributions are computed.
FEWEST = 10

#: Number of random halves that are predicted, share of their variance that must be explained, and the factor by which
#: the predicted spread may miss theirs.
HALVES, EXPLAINED, FACTOR = 64, 0.8, 1.4

#: Number of random halves on which a mean must be a mean.
PROBES = 3

#: Seconds that all leave-one-out evaluations of an aggregate may take.
PATIENCE = 300.0

Array = NDArray[np.float64]
Units = NDArray[np.intp]
Aggregate = Callable[[list[Any]], Any]


class NoContributions(Exception):
    """An aggregate has no reliable contributions of samples; the message is the reason."""


@dataclass(frozen=True)
class Influence:
    """Contributions of samples.

    Attributes:
        values: (n,) contribution of each sample; their mean is the aggregate.
        stderr: standard error of the aggregate.
    """

    values: Array
    stderr: float


def assign_blocks(
    units: Sequence[int], samples: int, blocks: int | None, seed: int = 0
) -> list[int]:
    """Return a block for each unit, the units themselves if there are few; equal arguments give equal blocks.

    Args:
        units: distinct units, in order.
        samples: number of samples in all units.
        blocks: number of blocks; None: as many as `VISITS` allows.
        seed: of the permutation that assigns blocks; it makes blocks independent of the order of samples.
    """
    count = blocks or (len(units) if len(units) <= ALONE else max(BLOCKS, VISITS // samples))
    if count >= len(units):
        return list(range(len(units)))
    places = np.random.default_rng(seed).permutation(len(units)) % count
    return [int(place) for place in places]


def unit_aggregates(
    aggregate: Aggregate, raw: Sequence[Any], units: Sequence[int], value: float
) -> Array | None:
    """Return the aggregate of each single unit if their mean is the total aggregate; else None.

    Many aggregates of tasks are means of samples or of groups, such as circular accuracies. For an aggregate of zero
    the test would be too weak.

    Args:
        aggregate: the task's function of a list of values.
        raw: (n,) one value per sample.
        units: (n,) the unit of each sample.
        value: the total aggregate; tasks may have rounded it to five digits.

    Returns:
        (n,) the aggregate of each sample's unit.
    """
    members: dict[int, list[Any]] = {}
    for unit, sample in zip(units, raw, strict=True):
        members.setdefault(unit, []).append(sample)
    try:
        aggregates = {unit: _value(aggregate, values) for unit, values in members.items()}
    except NoContributions:
        return None
    mean = math.fsum(aggregates.values()) / len(aggregates)
    if value == 0 or not math.isclose(mean, value, rel_tol=1e-4):
        return None
    return np.array([aggregates[unit] for unit in units])


def is_mean(aggregate: Aggregate, raw: Sequence[Any], numbers: Sequence[float]) -> bool:
    """Return whether the aggregates of random halves are means of their numbers, as the total aggregate is.

    The total may equal the mean by chance: F1 is the accuracy if there are as many true positives as true negatives.
    An aggregate that fails on halves counts as a mean.
    """
    rng = np.random.default_rng(0)
    for _ in range(PROBES if len(raw) > 1 else 0):
        half = rng.permutation(len(raw))[: len(raw) // 2].tolist()
        try:
            value = _value(aggregate, [raw[i] for i in half])
        except NoContributions:
            return True
        mean = math.fsum(numbers[i] for i in half) / len(half)
        if not math.isclose(value, mean, rel_tol=1e-4, abs_tol=1e-9):
            return False
    return True


def influence(
    aggregate: Aggregate, raw: Sequence[Any], units: Sequence[int], seed: int = 0
) -> Influence:
    """Return the contribution of each sample to `aggregate(raw)`.

    Args:
        aggregate: the task's function of a list of values.
        raw: (n,) one value per sample.
        units: (n,) the unit of each sample; a unit is left out as a whole.
        seed: of the random halves.

    Raises:
        NoContributions: too few units; or the aggregate fails on a part of the samples, is not smooth or is too slow.

    Cost: one aggregation for each unit, and `HALVES` aggregations of half the samples.
    """
    _, place, sizes = np.unique(np.asarray(units), return_inverse=True, return_counts=True)
    count = len(sizes)
    if count < FEWEST:
        raise NoContributions(f"{count} independent samples are too few; valid: at least {FEWEST}")
    started = time.perf_counter()
    total = _value(aggregate, list(raw))
    taken = (time.perf_counter() - started) * count
    if taken > PATIENCE:
        raise NoContributions(
            f"leaving out {count} times would take {taken:.0f} s; benchmark.blocks sets a smaller number"
        )
    order = np.argsort(place, kind="stable")
    members = np.split(order, np.cumsum(sizes)[:-1])
    leave_out = [_value(aggregate, _without(raw, indices)) for indices in members]
    deviations = (count - 1) * (total - np.array(leave_out))
    deviations -= deviations.mean()
    _check_fit(aggregate, raw, place, deviations, seed)
    share = len(raw) / count / sizes
    values = total + (deviations * share)[place]
    return Influence(values, float(deviations.std(ddof=1) / math.sqrt(count)))


def _check_fit(
    aggregate: Aggregate, raw: Sequence[Any], place: Units, deviations: Array, seed: int
) -> None:
    """Raise NoContributions unless the contributions predict the aggregates of random halves of the units."""
    if not deviations.any():
        # No unit changes the aggregate, as if every answer is right: there is nothing to predict.
        return
    rng = np.random.default_rng(seed)
    half = len(deviations) // 2
    measured, predicted = [], []
    for _ in range(HALVES):
        chosen = np.zeros(len(deviations), dtype=bool)
        chosen[rng.permutation(len(deviations))[:half]] = True
        measured.append(_value(aggregate, [raw[i] for i in np.flatnonzero(chosen[place]).tolist()]))
        predicted.append(deviations[chosen].mean())
    spread, expected = float(np.std(measured)), float(np.std(predicted))
    if min(spread, expected) == 0:
        raise NoContributions("single samples do not predict how it varies")
    explained = float(np.corrcoef(measured, predicted)[0, 1]) ** 2
    if explained < EXPLAINED or not 1 / FACTOR < spread / expected < FACTOR:
        raise NoContributions(
            f"it does not vary as single samples predict (they explain {explained:.0%} of it, spread {spread:.3g} "
            f"against {expected:.3g})"
        )


def _without(raw: Sequence[Any], without: NDArray[np.intp]) -> list[Any]:
    left_out = set(without.tolist())
    return [value for i, value in enumerate(raw) if i not in left_out]


def _value(aggregate: Aggregate, raw: list[Any]) -> float:
    try:
        value = aggregate(raw)
    except Exception as error:
        # A task's function, called with a subset of the samples, may raise anything.
        raise NoContributions(
            f"it fails on a part of the samples: {type(error).__name__}: {error}"
        ) from error
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(float(value)):
        raise NoContributions(f"of a part of the samples it is {value!r}")
    return float(value)
