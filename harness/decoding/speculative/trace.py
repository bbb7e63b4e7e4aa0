"""The rounds of a decoded answer, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean


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
