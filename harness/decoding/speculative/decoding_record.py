"""Rounds and figures of a speculatively decoded answer, and its record in the form stored in a journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Round:
    """One forward of the target, and the tokens drafted for it or meanwhile.

    Attributes:
        pending: unverified drafted tokens before the round.
        drafted: drafted tokens, all nodes of a tree.
        checked: drafted tokens that were judged, one per place (siblings count once).
        accepted: number of accepted tokens among them.
        target_added: whether the target added a token that the draft had not proposed.
        seconds: by the clock of the run.
        draft_seconds: the drafter's part.
        target_seconds: the target's part.
        draft_busy: seconds of the drafter's part in which its processor worked.
        target_busy: likewise of the target's.
    """

    pending: int
    drafted: int
    checked: int
    accepted: int
    target_added: bool
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_busy: float = 0.0
    target_busy: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether a drafted token was refused, so that the tokens drafted after it are lost."""
        return self.accepted < self.checked


@dataclass
class DecodingTrace:
    """A finished answer.

    Attributes:
        tokens: verified tokens, cut at the end of sequence or at the limit.
        rounds: all rounds, the first with the prefill.
        degraded: the reason if the drafter was lost and the target went on alone; None otherwise.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    degraded: str | None = None

    @property
    def tokens_per_target_forward(self) -> float:
        """Verified tokens, including replaced and added ones, over forwards of the target (including the prefill)."""
        return sum(step.accepted + step.target_added for step in self.rounds) / len(self.rounds)

    @property
    def runs(self) -> tuple[list[int], int]:
        """Accepted drafted tokens between two refusals, and the unfinished run at the end."""
        ended: list[int] = []
        run = 0
        for step in self.rounds:
            run += step.accepted
            if step.refused:
                ended.append(run)
                run = 0
        return ended, run

    @property
    def mean_run(self) -> float | None:
        """Mean accepted length as parallel decoders count it: without replaced tokens and the unfinished run."""
        ended, _ = self.runs
        return fmean(ended) if ended else None

    @property
    def acceptance(self) -> float | None:
        """Accepted over judged drafted tokens."""
        judged = sum(step.checked for step in self.rounds)
        return sum(step.accepted for step in self.rounds) / judged if judged else None

    @property
    def acceptance_by_place(self) -> list[float]:
        """Share accepted of those judged at the first, second, ... place of a round.

        Judging stops at the first refusal, so a later place counts only rounds that reached it.
        """
        shares = []
        for place in range(max((step.checked for step in self.rounds), default=0)):
            judged = [
                step for step in self.rounds if step.checked > place and step.accepted >= place
            ]
            if judged:
                shares.append(fmean(step.accepted > place for step in judged))
        return shares

    @property
    def rollbacks(self) -> int:
        """Number of rounds in which drafted tokens were lost."""
        return sum(step.refused for step in self.rounds)

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return sum(step.seconds for step in self.rounds)

    @property
    def overlap(self) -> float | None:
        """Time during which both sides worked, over the shorter side's time; None if there was nothing to overlap.

        max(B_draft + B_target - T_wall, 0) over min(B_draft, B_target), both summed over rounds, where B is the time in
        which a side's processor worked. This is a lower bound of the common working time, and exact if one side always
        worked. Two sides that share a core take turns on it and get 0.
        """
        shorter = sum(min(step.draft_busy, step.target_busy) for step in self.rounds)
        overlaps = (step.draft_busy + step.target_busy - step.seconds for step in self.rounds)
        return sum(max(time, 0.0) for time in overlaps) / shorter if shorter > 0 else None


def pooled(traces: Sequence[DecodingTrace]) -> DecodingTrace:
    """Return all rounds of several answers as one trace, for figures over a set of answers."""
    pool = DecodingTrace()
    for trace in traces:
        pool.tokens += trace.tokens
        pool.rounds += trace.rounds
        pool.degraded = pool.degraded or trace.degraded
    return pool


@dataclass(frozen=True)
class ForwardTimes:
    """Seconds of one forward, measured before an answer (harness/decoding/speculative/forward_times.py).

    Attributes:
        target: of one token.
        draft: of one drafted token, or of one level of a tree.
    """

    target: float
    draft: float

    @property
    def ratio(self) -> float:
        """Draft forwards that take as long as one of the target: c."""
        return self.target / self.draft


@dataclass(frozen=True)
class AnswerTimes:
    """Seconds of one answer from inputs to ids; reading files and preprocessing images come before.

    Attributes:
        prefill: until the target's first row is ready.
        draft_prefill: until the draft is ready too, beyond that; the part hidden by the target's prefill is not
            counted.
        decode: all later seconds.
        tokens: number of tokens of the answer.
    """

    prefill: float
    draft_prefill: float
    decode: float
    tokens: int

    @property
    def total(self) -> float:
        """Sum of the three."""
        return self.prefill + self.draft_prefill + self.decode


@dataclass(frozen=True)
class Mismatch:
    """Where an answer first differs from plain decoding, and the logit gap of the two tokens there."""

    place: int
    gap: float


@dataclass(frozen=True, kw_only=True)
class DecodingRecord:
    """One answer; its fields are stored in journals under these names.

    Attributes:
        gamma: the window.
        rounds: all rounds.
        spent: times of this decoder.
        plain: times of the target alone, None if it was not run.
        mismatch: None if the answers agree, or were not compared.
        steps: forward times measured so far; None without a draft.
        draft_visual: visual tokens that the draft saw (for a partial cache, entries averaged over layers).
        devices: devices that are busy in addition to the target's.
        target_devices: number of devices of the target.
        apart: False if both sides are streams of one GPU, so that neither side's time is separable.
        in_turn: whether the sides of a parallel decoder took turns, since they had one processor.
        first: whether the first round is the prefill, at the same time as the draft's.
        degraded: why the target went on alone; None if it did not.
    """

    gamma: int
    draft_visual: float
    devices: int
    target_devices: int = 1
    apart: bool = True
    in_turn: bool = False
    first: bool
    degraded: str | None
    rounds: tuple[Round, ...]
    spent: AnswerTimes
    plain: AnswerTimes | None
    mismatch: Mismatch | None
    steps: ForwardTimes | None

    def entry(self) -> dict[str, Any]:
        """Return the JSON form; a round is a list of its fields."""
        return {**asdict(self), "rounds": [list(astuple(round_)) for round_ in self.rounds]}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> DecodingRecord:
        """Rebuild from the JSON form."""
        parts = {
            "rounds": tuple(Round(*fields) for fields in entry["rounds"]),
            "spent": AnswerTimes(**entry["spent"]),
            "plain": entry["plain"] and AnswerTimes(**entry["plain"]),
            "mismatch": entry["mismatch"] and Mismatch(**entry["mismatch"]),
            "steps": entry["steps"] and ForwardTimes(**entry["steps"]),
        }
        return cls(**{**entry, **parts})
