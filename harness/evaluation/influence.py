"""What each sample contributes to an aggregate that is no mean: leave-one-out, so that means over it do the rest.

With G units (samples, or clusters of them), the influence of unit g is (G - 1) (all - all without g), the jackknife's
(Quenouille 1956, Tukey 1958), centred; a contribution is the aggregate plus the influence. The mean of contributions
is the aggregate, and their spread its standard error, for whatever is smooth in the weights of the samples: ratios,
F1, sums of group scores, CIDEr. For medians and maxima it is not, nor for a handful of samples; so the contributions
must first foretell the aggregates of random halves, which need no smoothness (Shao and Wu 1989). What that does not
tell is a maximum whose largest sample stands apart: to halves it is a sample like the one wrong answer of many.
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

#: Units that are left out one by one; of more, blocks are.
ALONE = 2000

#: Samples that all evaluations of an aggregate may see together, beyond `ALONE` units.
VISITS = 10_000_000

#: Blocks at least: an error from 200 of them is known to 5 %.
BLOCKS = 200

#: Units below which nothing is concluded.
FEWEST = 10

#: Random halves that are foretold, the share of their variance that must be explained, and by what factor the
#: spread that is foretold may miss theirs.
HALVES, EXPLAINED, FACTOR = 64, 0.8, 1.4

#: Random halves on which a mean must be one.
PROBES = 3

#: Seconds that an aggregate may take for all leave-outs together.
PATIENCE = 300.0

Array = NDArray[np.float64]
Units = NDArray[np.intp]
Aggregate = Callable[[list[Any]], Any]


class NoContributions(Exception):
    """An aggregate has no contributions of samples that could be trusted; the reason is the message."""


@dataclass(frozen=True)
class Influence:
    """Contributions of samples.

    Attributes:
        values: (n,) of each sample; their mean is the aggregate.
        stderr: of the aggregate.
    """

    values: Array
    stderr: float


def blocked(units: Sequence[int], samples: int, blocks: int | None, seed: int = 0) -> list[int]:
    """Return a block for each unit, the units themselves where there are few; equal arguments give equal blocks.

    Args:
        units: distinct, in order.
        samples: how many samples they hold together.
        blocks: how many; None: as many as `VISITS` pays for.
        seed: of the permutation that deals them out; a random partition keeps what order the samples come in out of it.
    """
    count = blocks or (len(units) if len(units) <= ALONE else max(BLOCKS, VISITS // samples))
    if count >= len(units):
        return list(range(len(units)))
    places = np.random.default_rng(seed).permutation(len(units)) % count
    return [int(place) for place in places]


def unit_aggregates(
    aggregate: Aggregate, raw: Sequence[Any], units: Sequence[int], value: float
) -> Array | None:
    """Return the aggregate of each unit by itself if their mean is the whole's; else None.

    So many aggregates of a task's own are means in the end, of samples or of groups of them: circular accuracies,
    answers that are judged only when all are there. An aggregate of zero says too little to tell.

    Args:
        aggregate: the task's own function of a list of values.
        raw: (n,) one value a sample.
        units: (n,) the unit of each sample.
        value: the aggregate of all; tasks may have rounded it to five digits.

    Returns:
        (n,) the aggregate of each sample's unit.
    """
    members: dict[int, list[Any]] = {}
    for unit, one in zip(units, raw, strict=True):
        members.setdefault(unit, []).append(one)
    try:
        aggregates = {unit: _value(aggregate, values) for unit, values in members.items()}
    except NoContributions:
        return None
    mean = math.fsum(aggregates.values()) / len(aggregates)
    if value == 0 or not math.isclose(mean, value, rel_tol=1e-4):
        return None
    return np.array([aggregates[unit] for unit in units])


def is_mean(aggregate: Aggregate, raw: Sequence[Any], numbers: Sequence[float]) -> bool:
    """Say whether the aggregates of random halves are the means of their numbers, as that of the whole is.

    The whole may be so by chance: F1 is the accuracy wherever there are as many true positives as true negatives. Where
    an aggregate does not take halves there is nothing to say against it.
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
    """Return what each sample contributes to `aggregate(raw)`.

    Args:
        aggregate: the task's own function of a list of values.
        raw: (n,) one value a sample.
        units: (n,) the unit of each sample; a unit is left out as a whole.
        seed: of the random halves.

    Raises:
        NoContributions: too few units; or the aggregate fails on a part of the samples, is not smooth or is too slow.

    Cost: one aggregate for each unit, and `HALVES` more of half the samples.
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
    """Raise NoContributions unless the contributions foretell the aggregates of random halves of the units."""
    if not deviations.any():
        # Nobody moves the aggregate, as where every answer is right: there is nothing to foretell.
        return
    rng = np.random.default_rng(seed)
    half = len(deviations) // 2
    measured, foretold = [], []
    for _ in range(HALVES):
        chosen = np.zeros(len(deviations), dtype=bool)
        chosen[rng.permutation(len(deviations))[:half]] = True
        measured.append(_value(aggregate, [raw[i] for i in np.flatnonzero(chosen[place]).tolist()]))
        foretold.append(deviations[chosen].mean())
    spread, expected = float(np.std(measured)), float(np.std(foretold))
    if min(spread, expected) == 0:
        raise NoContributions("single samples do not tell how it varies")
    explained = float(np.corrcoef(measured, foretold)[0, 1]) ** 2
    if explained < EXPLAINED or not 1 / FACTOR < spread / expected < FACTOR:
        raise NoContributions(
            f"it does not vary as single samples tell (they explain {explained:.0%} of it, spread {spread:.3g} "
            f"against {expected:.3g})"
        )


def _without(raw: Sequence[Any], without: NDArray[np.intp]) -> list[Any]:
    left_out = set(without.tolist())
    return [value for i, value in enumerate(raw) if i not in left_out]


def _value(aggregate: Aggregate, raw: list[Any]) -> float:
    try:
        value = aggregate(raw)
    except Exception as error:
        # A task's own function, on a part of the samples that its author never saw: anything may be raised.
        raise NoContributions(
            f"it fails on a part of the samples: {type(error).__name__}: {error}"
        ) from error
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(float(value)):
        raise NoContributions(f"of a part of the samples it is {value!r}")
    return float(value)
