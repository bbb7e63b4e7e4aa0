"""The figures of a row that was decoded speculatively; docs/speculative.md defines each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from harness.decoding import renewal
from harness.decoding.telling import Spent, Telling
from harness.decoding.trace import Trace


def speculative_block(decodings: Sequence[Mapping[str, Any]], overlap: bool) -> dict[str, Any]:
    """Return what `extra.speculative` holds.

    Args:
        decodings: `Record.decoding` of every sample.
        overlap: whether draft and target work at once.
    """
    tellings = [Telling.from_entry(one) for one in decodings]
    devices = 1 + tellings[0].devices
    steady = [one for one in tellings if one.degraded is None]
    rounds = steady_rounds(steady)
    gamma = median(one.gamma for one in tellings)
    found = {
        "gamma": gamma,
        "overlap": overlap,
        "devices": devices,
        "draft_visual": fmean(one.draft_visual for one in tellings),
        **_lengths(rounds),
        **_times(steady, rounds),
        **_speedups(tellings, devices),
        "overlap_efficiency": rounds.overlap if overlap else None,
        "startup_wait_ms": 1000 * fmean(one.spent.draft_prefill for one in tellings),
        "mismatches": _mismatches(tellings),
        "degraded": _degraded(tellings),
    }
    return found | _predicted(found, steady, overlap)


def steady_rounds(tellings: Sequence[Telling]) -> Trace:
    """Return the rounds of several answers without those that were prefills, as one trace.

    Runs of accepted tokens are chained: one that an answer's end cuts off goes on in the next answer.
    """
    found = Trace()
    for one in tellings:
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


def _times(tellings: Sequence[Telling], rounds: Trace) -> dict[str, float | None]:
    """Return the times of single forwards in milliseconds, out of the run itself.

    The target's own step is one of plain decoding; where that was not asked for, it is the one measured beforehand.
    """
    before = next((one.steps for one in reversed(tellings) if one.steps is not None), None)
    plain = [one.plain for one in tellings if one.plain is not None and one.plain.tokens > 1]
    target = None if before is None else before.target
    if plain:
        target = sum(one.decode for one in plain) / sum(one.tokens - 1 for one in plain)
    # Each answer has its own window: as many forwards of the draft in each of its rounds.
    busy, forwards = 0.0, 0
    for one in tellings:
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


def _speedups(tellings: Sequence[Telling], devices: int) -> dict[str, float | None]:
    """Return speed-ups over plain decoding of the same answers by the same loop."""
    pairs = [(one.plain, one.spent) for one in tellings if one.plain is not None]
    if not pairs:
        names = ("decode", "decode_mean_of_ratios", "end_to_end", "end_to_end_mean_of_ratios")
        return dict.fromkeys([f"speedup_{name}" for name in (*names, "per_device")])
    whole = _ratio(pairs, lambda one: one.total / one.tokens)
    return {
        "speedup_decode": _ratio(pairs, _decoding),
        "speedup_decode_mean_of_ratios": _mean_of_ratios(pairs, _decoding),
        "speedup_end_to_end": whole,
        "speedup_end_to_end_mean_of_ratios": _mean_of_ratios(pairs, lambda one: one.total),
        "speedup_per_device": whole / devices,
    }


def _decoding(one: Spent) -> float:
    """Return seconds a token behind the first, which the prefill brings."""
    return one.decode / max(one.tokens - 1, 1)


def _ratio(pairs: Sequence[tuple[Spent, Spent]], seconds: Callable[[Spent], float]) -> float:
    """Return the ratio of the means."""
    return fmean(seconds(plain) for plain, _ in pairs) / fmean(seconds(own) for _, own in pairs)


def _mean_of_ratios(
    pairs: Sequence[tuple[Spent, Spent]], seconds: Callable[[Spent], float]
) -> float:
    """Return the mean over answers of their own ratios."""
    return fmean(seconds(plain) / seconds(own) for plain, own in pairs)


def _predicted(
    found: Mapping[str, Any], tellings: Sequence[Telling], overlap: bool
) -> dict[str, float | None]:
    """Return the decode speed-up that acceptance and single forwards promise, and what was reached of it."""
    acceptance, target = found.get("acceptance"), found["target_ms"]
    draft, window, measured = found["draft_ms"], found["window_ms"], found["speedup_decode"]
    if acceptance is None or not target or not draft:
        names = ("speedup_predicted", "predicted_reached")
        return dict.fromkeys((*names, "speedup_predicted_window", "predicted_window_reached"))
    formula = renewal.parallel_speedup if overlap else renewal.sequential_speedup

    def expected(step: float) -> float:
        """Return the speed-up over all answers, whose times add up, whatever the window of each."""
        tokens = Counter[int]()
        for one in tellings:
            tokens[one.gamma] += one.spent.tokens
        spent = (count / formula(acceptance, gamma, step, draft) for gamma, count in tokens.items())
        return tokens.total() / sum(spent)

    promised = expected(target)
    # A window is verified in another time than plain decoding takes for a token.
    windows = expected(window) * target / window
    return {
        "speedup_predicted": promised,
        "predicted_reached": None if measured is None else measured / promised,
        "speedup_predicted_window": windows,
        "predicted_window_reached": None if measured is None else measured / windows,
    }


def _mismatches(tellings: Sequence[Telling]) -> dict[str, Any] | None:
    """Return how many answers differ from plain decoding; None if none was compared."""
    compared = [one for one in tellings if one.plain is not None]
    if not compared:
        return None
    found = [one.mismatch for one in compared if one.mismatch is not None]
    return {
        "compared": len(compared),
        "answers": len(found),
        "first_place": min((one.place for one in found), default=None),
        "largest_gap": max((one.gap for one in found), default=None),
    }


def _degraded(tellings: Sequence[Telling]) -> dict[str, Any]:
    """Return how many answers the target had to finish alone, and why the first of them."""
    found = [one.degraded for one in tellings if one.degraded is not None]
    return {"answers": len(found), "why": found[0] if found else None}
