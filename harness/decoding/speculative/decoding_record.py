"""The record of one speculatively decoded answer, in the form stored in a journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from espalier.harness.decoding.speculative.trace import Round


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


#: Fields of an answer that its JSON form holds unchanged.
UNCHANGED = ("gamma", "draft_visual", "devices", "target_devices", "apart", "first", "degraded")


@dataclass(frozen=True)
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
        first: whether the first round is the prefill, at the same time as the draft's.
        degraded: why the target went on alone; None if it did not.
    """

    gamma: int
    rounds: tuple[Round, ...]
    spent: AnswerTimes
    plain: AnswerTimes | None
    mismatch: Mismatch | None
    steps: ForwardTimes | None
    draft_visual: float
    devices: int
    first: bool
    degraded: str | None
    target_devices: int = 1
    apart: bool = True

    def entry(self) -> dict[str, Any]:
        """Return the JSON form; a round is a list of its fields."""
        return {
            **{name: getattr(self, name) for name in UNCHANGED},
            "rounds": [list(astuple(round_)) for round_ in self.rounds],
            "spent": asdict(self.spent),
            "plain": self.plain and asdict(self.plain),
            "mismatch": self.mismatch and asdict(self.mismatch),
            "steps": self.steps and asdict(self.steps),
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> DecodingRecord:
        """Rebuild from the JSON form."""
        return cls(
            **{name: entry[name] for name in UNCHANGED},
            rounds=tuple(Round(*fields) for fields in entry["rounds"]),
            spent=AnswerTimes(**entry["spent"]),
            plain=entry["plain"] and AnswerTimes(**entry["plain"]),
            mismatch=entry["mismatch"] and Mismatch(**entry["mismatch"]),
            steps=entry["steps"] and ForwardTimes(**entry["steps"]),
        )
