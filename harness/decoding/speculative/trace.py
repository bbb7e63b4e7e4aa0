"""What happened round by round, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(frozen=True)
class Round:
    """One forward of the target, and what was drafted for it or meanwhile.

    Attributes:
        pending: drafted tokens that stood unverified before.
        drafted: tokens, all nodes of a tree.
        checked: drafted tokens that were judged, one for each place (siblings count once).
        accepted: how many of them, from the first on, stood.
        own: whether the target added a token of its own.
        seconds: by the clock of the run.
        draft_seconds: the drafter's part of them.
        target_seconds: the target's.
        draft_busy: of the drafter's part, the seconds in which its processor worked.
        target_busy: of the target's.
    """

    pending: int
    drafted: int
    checked: int
    accepted: int
    own: bool
    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_busy: float = 0.0
    target_busy: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether a drafted token was refused, so that what was drafted behind it is lost."""
        return self.accepted < self.checked


@dataclass
class Trace:
    """A finished answer.

    Attributes:
        tokens: verified ones only, cut at the end of sequence or at the limit.
        rounds: all of them, the first with the prefill.
        degraded: the drafter was lost on the way, and the target went on alone; says why, None if it was not.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    degraded: str | None = None

    @property
    def tokens_per_target_forward(self) -> float:
        """Verified tokens, replaced and added ones included, over forwards of the target (the prefill's counts)."""
        return sum(one.accepted + one.own for one in self.rounds) / len(self.rounds)

    @property
    def runs(self) -> tuple[list[int], int]:
        """Accepted drafted tokens between two refusals, and the run at the end that none ended."""
        ended: list[int] = []
        run = 0
        for one in self.rounds:
            run += one.accepted
            if one.refused:
                ended.append(run)
                run = 0
        return ended, run

    @property
    def mean_run(self) -> float | None:
        """Mean accepted length as parallel decoders count it: replaced tokens and the unended run left out."""
        ended, _ = self.runs
        return fmean(ended) if ended else None

    @property
    def acceptance(self) -> float | None:
        """Accepted over judged drafted tokens."""
        judged = sum(one.checked for one in self.rounds)
        return sum(one.accepted for one in self.rounds) / judged if judged else None

    @property
    def acceptance_by_place(self) -> list[float]:
        """Share accepted of those judged at the first, second, ... place of a round.

        Judging stops at the first refusal, so a later place counts only rounds that got there.
        """
        found = []
        for place in range(max((one.checked for one in self.rounds), default=0)):
            judged = [one for one in self.rounds if one.checked > place and one.accepted >= place]
            if judged:
                found.append(fmean(one.accepted > place for one in judged))
        return found

    @property
    def rollbacks(self) -> int:
        """Rounds in which something drafted was lost."""
        return sum(one.refused for one in self.rounds)

    @property
    def seconds(self) -> float:
        """Of all rounds."""
        return sum(one.seconds for one in self.rounds)

    @property
    def overlap(self) -> float | None:
        """Time both sides worked at once over what the shorter side had to do; None if nothing was to overlap.

        max(B_draft + B_target - T_wall, 0) over min(B_draft, B_target), both summed over rounds, where B is the time in
        which a side's processor worked. So much they worked at once at least, and just so much if one always did. Two
        sides that share a core take turns on it and come out at 0.
        """
        shorter = sum(min(one.draft_busy, one.target_busy) for one in self.rounds)
        both = (one.draft_busy + one.target_busy - one.seconds for one in self.rounds)
        return sum(max(time, 0.0) for time in both) / shorter if shorter > 0 else None


def pooled(traces: Sequence[Trace]) -> Trace:
    """Return all rounds of several answers as one trace, for figures over a set."""
    whole = Trace()
    for trace in traces:
        whole.tokens += trace.tokens
        whole.rounds += trace.rounds
        whole.degraded = whole.degraded or trace.degraded
    return whole
