"""The figures of a row that was decoded speculatively; docs/speculative.md defines each of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from espalier.harness.decoding.speculative import renewal
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord, Spent
from espalier.harness.decoding.speculative.trace import Trace
from espalier.harness.stats import Interval, rate_ratio_interval


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up over plain decoding of the same answers.

    Attributes:
        ratio: seconds a token of all plain answers together over those of all own, so that every token weighs the same,
            with its 95 % bootstrap interval over answers.
        mean: over answers, each weighing the same, of their own ratios.
    """

    ratio: Interval
    mean: float

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval; None for a single answer."""
        low, high = self.ratio.low, self.ratio.high
        return None if math.isnan(low) else (low, high)


def decoding(spent: Spent) -> tuple[float, int]:
    """Return the seconds behind the prefill, and the tokens behind the first, which the prefill brings."""
    return spent.decode, spent.tokens - 1


def whole(spent: Spent) -> tuple[float, int]:
    """Return all seconds and all tokens."""
    return spent.total, spent.tokens


def speedup(
    records: Sequence[DecodingRecord], part: Callable[[Spent], tuple[float, int]]
) -> SpeedUp | None:
    """Return how much faster answers came, of those compared; None if there are none, or no token to count.

    Args:
        records: the answers.
        part: the seconds and the tokens of an answer that count; answers without such tokens do not.
    """
    found = [(*part(one.plain), *part(one.spent)) for one in records if one.plain is not None]
    counted = [one for one in found if min(one) > 0]
    if not counted:
        return None
    mean = fmean((slow / many) / (quick / own) for slow, many, quick, own in counted)
    return SpeedUp(rate_ratio_interval(counted), mean)


#: Keys of what is predicted.
PREDICTED = (
    "speedup_predicted",
    "predicted_reached",
    "speedup_predicted_window",
    "predicted_window_reached",
)


def speculative_block(decodings: Sequence[Mapping[str, Any]], overlap: bool) -> dict[str, Any]:
    """Return what `extra.speculative` holds.

    Args:
        decodings: `Record.decoding` of every sample.
        overlap: whether draft and target work at once.
    """
    records = [DecodingRecord.from_entry(one) for one in decodings]
    # A draft whose process was lost occupies nothing for the answers after; the others say what it takes.
    devices = max(one.target_devices + one.devices for one in records)
    steady = [one for one in records if one.degraded is None]
    rounds = steady_rounds(steady)
    gamma = median(one.gamma for one in records)
    found = {
        "gamma": gamma,
        "overlap": overlap,
        "devices": devices,
        "target_devices": records[0].target_devices,
        "draft_visual": fmean(one.draft_visual for one in records),
        **_lengths(rounds),
        **_times(steady, rounds),
        **_speedups(records, records[0].target_devices / devices),
        "overlap_efficiency": rounds.overlap if overlap and records[0].apart else None,
        "startup_wait_ms": 1000 * fmean(one.spent.draft_prefill for one in records),
        "mismatches": _mismatches(records),
        "degraded": _degraded(records),
    }
    return found | _predicted(found, steady, overlap) | {"speedup_bound": _bound(found, steady)}


def steady_rounds(records: Sequence[DecodingRecord]) -> Trace:
    """Return the rounds of several answers without those that were prefills, as one trace.

    Runs of accepted tokens are chained: one that an answer's end cuts off goes on in the next answer.
    """
    found = Trace()
    for one in records:
        found.rounds += one.rounds[1:] if one.first else one.rounds
    return found


def _lengths(rounds: Trace) -> dict[str, Any]:
    """Return how far drafts got."""
    if not rounds.rounds:
        return {}
    ended, unended = rounds.runs
    return {
        "rounds": len(rounds.rounds),
        "rollbacks": rounds.rollbacks,
        "tokens_per_target_forward": rounds.tokens_per_target_forward,
        "mean_run": rounds.mean_run,
        "runs": len(ended),
        "unended_run": unended,
        "acceptance": rounds.acceptance,
        "acceptance_by_place": rounds.acceptance_by_place,
    }


def _times(records: Sequence[DecodingRecord], rounds: Trace) -> dict[str, float | None]:
    """Return the times of single forwards in milliseconds, out of the run itself.

    The target's own step is one of plain decoding; where that was not asked for, it is the one measured beforehand.
    """
    before = next((one.steps for one in reversed(records) if one.steps is not None), None)
    plain = [one.plain for one in records if one.plain is not None and one.plain.tokens > 1]
    target = None if before is None else before.target
    if plain:
        target = sum(one.decode for one in plain) / sum(one.tokens - 1 for one in plain)
    # Each answer has its own window: as many forwards of the draft in each of its rounds.
    busy, forwards = 0.0, 0
    for one in records:
        drafted = [part for part in steady_rounds([one]).rounds if part.drafted]
        busy += sum(part.draft_seconds for part in drafted)
        forwards += one.gamma * len(drafted)
    draft = busy / forwards if forwards else None
    window = fmean(one.target_seconds for one in rounds.rounds) if rounds.rounds else None
    return {
        "target_ms": _ms(target),
        "window_ms": _ms(window),
        "draft_ms": _ms(draft),
        "c": target / draft if target and draft else None,
        "c_before": None if before is None else before.ratio,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _speedups(records: Sequence[DecodingRecord], share: float) -> dict[str, Any]:
    """Return speed-ups over plain decoding of the same answers by the same loop.

    Args:
        records: all answers, those that the target had to finish alone included.
        share: devices of plain decoding over those of both sides.
    """
    found = {"decode": speedup(records, decoding), "end_to_end": speedup(records, whole)}
    end_to_end = found["end_to_end"]
    return {
        **{f"speedup_{name}": one and one.ratio.value for name, one in found.items()},
        **{f"speedup_{name}_interval": one and one.bounds for name, one in found.items()},
        **{f"speedup_{name}_mean_of_ratios": one and one.mean for name, one in found.items()},
        "speedup_per_device": end_to_end and end_to_end.ratio.value * share,
    }


def _predicted(
    found: Mapping[str, Any], records: Sequence[DecodingRecord], overlap: bool
) -> dict[str, float | None]:
    """Return the decode speed-up that acceptance and single forwards promise, and what was reached of it."""
    acceptance, target = found.get("acceptance"), found["target_ms"]
    draft, window = found["draft_ms"], found["window_ms"]
    if acceptance is None or not target or not draft:
        return dict.fromkeys(PREDICTED)
    # Of the answers that the prediction is about, and each by its tokens, as there.
    reached = speedup(records, decoding)
    measured = None if reached is None else reached.ratio.value
    formula = renewal.parallel_speedup if overlap else renewal.sequential_speedup

    def expected(step: float) -> float:
        """Return the speed-up over all answers, whose times add up, whatever the window of each."""
        tokens = Counter[int]()
        for one in records:
            tokens[one.gamma] += max(one.spent.tokens - 1, 0)
        spent = (count / formula(acceptance, gamma, step, draft) for gamma, count in tokens.items())
        return tokens.total() / sum(spent)

    if all(one.spent.tokens < 2 for one in records):
        return dict.fromkeys(PREDICTED)
    promised = expected(target)
    # A window is verified in another time than plain decoding takes for a token.
    windows = expected(window) * target / window
    return {
        "speedup_predicted": promised,
        "predicted_reached": None if measured is None else measured / promised,
        "speedup_predicted_window": windows,
        "predicted_window_reached": None if measured is None else measured / windows,
    }


def _bound(found: Mapping[str, Any], records: Sequence[DecodingRecord]) -> float | None:
    """Return what decoding cannot exceed with the tokens that were accepted and with these times of single forwards.

    A round lasts as long as a step of the target at least, and as long as its draft: at once the longer of both, in
    turn their sum. Nothing is said of how acceptance is spread, unlike in what is predicted.
    """
    target: float | None = found["target_ms"]
    draft: float | None = found["draft_ms"]
    rounds = [(one.gamma, part) for one in records for part in steady_rounds([one]).rounds]
    if not target or not draft or not rounds:
        return None
    tokens = sum(part.accepted + part.own for _, part in rounds)
    sides = [(gamma * draft, target) for gamma, _ in rounds]
    least = sum(max(one) if found["overlap"] else sum(one) for one in sides)
    return target * tokens / least


def _mismatches(records: Sequence[DecodingRecord]) -> dict[str, Any] | None:
    """Return how many answers differ from plain decoding; None if none was compared."""
    compared = [one for one in records if one.plain is not None]
    if not compared:
        return None
    found = [one.mismatch for one in compared if one.mismatch is not None]
    return {
        "compared": len(compared),
        "answers": len(found),
        "first_place": min((one.place for one in found), default=None),
        "largest_gap": max((one.gap for one in found), default=None),
    }


def _degraded(records: Sequence[DecodingRecord]) -> dict[str, Any]:
    """Return how many answers the target had to finish alone, and why the first of them."""
    found = [one.degraded for one in records if one.degraded is not None]
    return {"answers": len(found), "why": found[0] if found else None}
