"""Figures of a speculatively decoded row, measured and expected; docs/speculative.md defines each of them.

Expected is the speed if every drafted token is accepted with the same probability. T_p and T_q are the times of one
step of target and draft, a the acceptance, gamma the window. ParallelVLM (arXiv 2603.19610) gives bounds; these are the
exact expectations of the two-state chain of parallel decoding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from espalier.harness.decoding.speculative.decoding_record import (
    AnswerTimes,
    DecodingRecord,
    DecodingTrace,
)
from espalier.harness.stats import Interval, rate_ratio_interval


def check_drafting(acceptance: float, gamma: int) -> None:
    """Raise ValueError for an acceptance outside [0, 1] or a window below 1."""
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance {acceptance} is not in [0, 1]")
    if gamma < 1:
        raise ValueError(f"gamma {gamma} is below 1")


def geometric(acceptance: float, terms: int) -> float:
    """Return 1 + a + ... + a^(terms - 1)."""
    return float(terms) if acceptance == 1 else (1 - acceptance**terms) / (1 - acceptance)


def parallel_tokens(acceptance: float, gamma: int) -> float:
    """Return the expected verified tokens per round of parallel decoding.

    After a refusal a round judges one token (one token verified, accepted or not); after a clean round it judges gamma
    (1 + a + ... + a^(gamma-1) verified on average), and is clean with probability a^gamma. The result is weighted by
    the frequency of both states.
    """
    check_drafting(acceptance, gamma)
    return geometric(acceptance, gamma) / (1 + acceptance - acceptance**gamma)


def sequential_tokens(acceptance: float, gamma: int) -> float:
    """Return the tokens of a round of drafting, then verifying: 1 + a + ... + a^gamma, including the target's own."""
    check_drafting(acceptance, gamma)
    return geometric(acceptance, gamma + 1)


def parallel_speedup(acceptance: float, gamma: int, target: float, draft: float) -> float:
    """Return the speed-up of parallel decoding over the target alone; `target` and `draft` are times of a step."""
    return parallel_tokens(acceptance, gamma) * target / max(gamma * draft, target)


def best_window(acceptance: float, target: float, draft: float) -> int:
    """Return the window with the highest gain of parallel decoding, the smallest among equals.

    Beyond ceil(target / draft) a round only takes longer. If every token is accepted, that is the window; if few are, a
    round should end as soon as the target's forward does.
    """
    windows = range(1, math.ceil(target / draft) + 1)
    return max(windows, key=lambda gamma: parallel_speedup(acceptance, gamma, target, draft))


def sequential_speedup(acceptance: float, gamma: int, target: float, draft: float) -> float:
    """Return the speed-up of drafting, then verifying, over the target alone."""
    return sequential_tokens(acceptance, gamma) * target / (gamma * draft + target)


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up over plain decoding of the same answers.

    Attributes:
        ratio: seconds per token of all plain answers over those of all answers of the decoder, so that every token has
            the same weight, with its 95 % bootstrap interval over answers.
        mean: mean of the ratio of each answer.
    """

    ratio: Interval
    mean: float

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval; None for a single answer."""
        low, high = self.ratio.low, self.ratio.high
        return None if math.isnan(low) else (low, high)


def decoding(spent: AnswerTimes) -> tuple[float, int]:
    """Return the seconds after the prefill, and the tokens after the first, which the prefill yields."""
    return spent.decode, spent.tokens - 1


def end_to_end(spent: AnswerTimes) -> tuple[float, int]:
    """Return all seconds and all tokens."""
    return spent.total, spent.tokens


def speedup(
    records: Sequence[DecodingRecord], part: Callable[[AnswerTimes], tuple[float, int]]
) -> SpeedUp | None:
    """Return the speed-up of the compared answers; None if there are none, or no token to count.

    Args:
        records: the answers.
        part: returns the seconds and tokens of an answer that count; answers without such tokens are left out.
    """
    times = [
        (*part(record.plain), *part(record.spent)) for record in records if record.plain is not None
    ]
    counted = [record for record in times if min(record) > 0]
    if not counted:
        return None
    mean = fmean((slow / many) / (quick / tokens) for slow, many, quick, tokens in counted)
    return SpeedUp(rate_ratio_interval(counted), mean)


#: Keys of predicted figures.
PREDICTED = (
    "speedup_predicted",
    "predicted_reached",
    "speedup_predicted_window",
    "predicted_window_reached",
)


def speculative_block(decodings: Sequence[Mapping[str, Any]], overlap: bool) -> dict[str, Any]:
    """Return the content of `extra.speculative`.

    Args:
        decodings: `Record.decoding` of every sample.
        overlap: whether draft and target work in parallel, unless they had one processor.
    """
    records = [DecodingRecord.from_entry(record) for record in decodings]
    in_turn = any(record.in_turn for record in records)
    overlap = overlap and not in_turn
    # A lost draft occupies no device for later answers, so take the maximum.
    devices = max(record.target_devices + record.devices for record in records)
    steady = [record for record in records if record.degraded is None]
    rounds = steady_rounds(steady)
    reasons = [record.degraded for record in records if record.degraded is not None]
    block = {
        "gamma": median(record.gamma for record in records),
        "overlap": overlap,
        "in_turn": "one processor" if in_turn else None,
        "devices": devices,
        "target_devices": records[0].target_devices,
        "draft_visual": fmean(record.draft_visual for record in records),
        **_lengths(rounds),
        **_times(steady, rounds),
        **_speedups(records, records[0].target_devices / devices),
        "overlap_efficiency": rounds.overlap if overlap and records[0].apart else None,
        "startup_wait_ms": 1000 * fmean(record.spent.draft_prefill for record in records),
        "mismatches": _mismatches(records),
        "degraded": {"answers": len(reasons), "why": next(iter(reasons), None)},
    }
    return block | _predicted(block, steady, overlap) | {"speedup_bound": _bound(block, steady)}


def steady_rounds(records: Sequence[DecodingRecord]) -> DecodingTrace:
    """Return the rounds of several answers without prefill rounds, as one trace.

    Runs of accepted tokens are chained: a run cut off by an answer's end continues in the next answer.
    """
    trace = DecodingTrace()
    for record in records:
        trace.rounds += record.rounds[1:] if record.first else record.rounds
    return trace


def _lengths(rounds: DecodingTrace) -> dict[str, Any]:
    """Return figures on accepted lengths."""
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


def _times(records: Sequence[DecodingRecord], rounds: DecodingTrace) -> dict[str, float | None]:
    """Return the times of single forwards in milliseconds, measured in the run itself.

    A step of the target is one of plain decoding; without plain decoding, the one measured beforehand.
    """
    measured = next(
        (record.steps for record in reversed(records) if record.steps is not None), None
    )
    plain = [
        record.plain for record in records if record.plain is not None and record.plain.tokens > 1
    ]
    target = None if measured is None else measured.target
    if plain:
        target = sum(record.decode for record in plain) / sum(record.tokens - 1 for record in plain)
    # Each answer has a window, which is the number of draft forwards in each of its rounds.
    busy, forwards = 0.0, 0
    for record in records:
        drafted = [step for step in steady_rounds([record]).rounds if step.drafted]
        busy += sum(step.draft_seconds for step in drafted)
        forwards += record.gamma * len(drafted)
    draft = busy / forwards if forwards else None
    window = fmean(record.target_seconds for record in rounds.rounds) if rounds.rounds else None
    seconds = {"target": target, "window": window, "draft": draft}
    return {
        **{f"{name}_ms": value and 1000 * value for name, value in seconds.items()},
        "c": target / draft if target and draft else None,
        "c_before": None if measured is None else measured.ratio,
    }


def _speedups(records: Sequence[DecodingRecord], share: float) -> dict[str, Any]:
    """Return speed-ups over plain decoding of the same answers by the same loop.

    Args:
        records: all answers, including those that the target finished alone.
        share: devices of plain decoding over those of both sides.
    """
    speedups = {"decode": speedup(records, decoding), "end_to_end": speedup(records, end_to_end)}
    total = speedups["end_to_end"]
    return {
        **{f"speedup_{name}": value and value.ratio.value for name, value in speedups.items()},
        **{f"speedup_{name}_interval": value and value.bounds for name, value in speedups.items()},
        **{
            f"speedup_{name}_mean_of_ratios": value and value.mean
            for name, value in speedups.items()
        },
        "speedup_per_device": total and total.ratio.value * share,
    }


def _predicted(
    block: Mapping[str, Any], records: Sequence[DecodingRecord], overlap: bool
) -> dict[str, float | None]:
    """Return the decode speed-up predicted from acceptance and single forwards, and the share reached of it."""
    acceptance, target = block.get("acceptance"), block["target_ms"]
    draft, window = block["draft_ms"], block["window_ms"]
    if acceptance is None or not target or not draft:
        return dict.fromkeys(PREDICTED)
    # For the same answers as the prediction, also weighted by tokens.
    reached = speedup(records, decoding)
    measured = None if reached is None else reached.ratio.value
    formula = parallel_speedup if overlap else sequential_speedup

    def expected(step: float) -> float:
        """Return the speed-up over the total time of all answers, each with its window."""
        tokens = Counter[int]()
        for record in records:
            tokens[record.gamma] += max(record.spent.tokens - 1, 0)
        spent = (count / formula(acceptance, gamma, step, draft) for gamma, count in tokens.items())
        return tokens.total() / sum(spent)

    if all(record.spent.tokens < 2 for record in records):
        return dict.fromkeys(PREDICTED)
    promised = expected(target)
    # Verifying a window takes a different time than one token of plain decoding.
    windows = expected(window) * target / window
    return {
        "speedup_predicted": promised,
        "predicted_reached": None if measured is None else measured / promised,
        "speedup_predicted_window": windows,
        "predicted_window_reached": None if measured is None else measured / windows,
    }


def _bound(block: Mapping[str, Any], records: Sequence[DecodingRecord]) -> float | None:
    """Return the upper bound of the decode speed-up for the accepted tokens and these times of single forwards.

    A round lasts at least as long as a step of the target and as its draft: in parallel the longer of both, in turn
    their sum. Unlike the prediction, this makes no assumption on the distribution of acceptance.
    """
    target: float | None = block["target_ms"]
    draft: float | None = block["draft_ms"]
    rounds = [(record.gamma, step) for record in records for step in steady_rounds([record]).rounds]
    if not target or not draft or not rounds:
        return None
    tokens = sum(step.accepted + step.target_added for _, step in rounds)
    sides = [(gamma * draft, target) for gamma, _ in rounds]
    return target * tokens / sum(max(pair) if block["overlap"] else sum(pair) for pair in sides)


def _mismatches(records: Sequence[DecodingRecord]) -> dict[str, Any] | None:
    """Return the number of answers that differ from plain decoding; None if none was compared."""
    compared = [record for record in records if record.plain is not None]
    if not compared:
        return None
    mismatches = [record.mismatch for record in compared if record.mismatch is not None]
    return {
        "compared": len(compared),
        "answers": len(mismatches),
        "first_place": min((record.place for record in mismatches), default=None),
        "largest_gap": max((record.gap for record in mismatches), default=None),
    }
