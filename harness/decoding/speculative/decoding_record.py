"""What one speculatively decoded answer tells, in a form that a journal keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from espalier.harness.decoding.speculative.trace import Round


@dataclass(frozen=True)
class Steps:
    """Seconds of one forward, measured before an answer (harness/decoding/speculative/forward_times.py).

    Attributes:
        target: of one token.
        draft: of one drafted token, or one level of a tree.
    """

    target: float
    draft: float

    @property
    def ratio(self) -> float:
        """Steps of the draft that take as long as one of the target: c."""
        return self.target / self.draft


@dataclass(frozen=True)
class Spent:
    """Seconds of one answer, input in, ids out; reading files and cutting pictures is before it.

    Attributes:
        prefill: until the target's first row is there.
        draft_prefill: until the draft is ready too, beyond that; what is hidden behind the target's is not counted.
        decode: from then on.
        tokens: of the answer.
    """

    prefill: float
    draft_prefill: float
    decode: float
    tokens: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.prefill + self.draft_prefill + self.decode


@dataclass(frozen=True)
class Mismatch:
    """Where an answer first differs from plain decoding, and how many logits the two tokens are apart there."""

    place: int
    gap: float


#: Fields of an answer that its JSON form has as they are.
PLAIN = ("gamma", "draft_visual", "devices", "target_devices", "apart", "first", "degraded")


@dataclass(frozen=True)
class DecodingRecord:
    """One answer.

    Attributes:
        gamma: the window.
        rounds: all of them.
        spent: by this decoder.
        plain: by the target alone, None if it was not asked.
        mismatch: None if the answers agree, or were not compared.
        steps: as measured so far; None where nobody drafts.
        draft_visual: visual tokens that the draft saw (entries, on average over layers, of a partial cache).
        devices: that are busy besides the target's.
        target_devices: those of the target.
        apart: False where both sides are streams of one GPU: neither's time then is its own.
        first: whether the first round is the prefill, at once with the draft's.
        degraded: why the target went on alone; None if it did not.
    """

    gamma: int
    rounds: tuple[Round, ...]
    spent: Spent
    plain: Spent | None
    mismatch: Mismatch | None
    steps: Steps | None
    draft_visual: float
    devices: int
    first: bool
    degraded: str | None
    target_devices: int = 1
    apart: bool = True

    def entry(self) -> dict[str, Any]:
        """Return the JSON form; a round is a list of its fields."""
        return {
            **{name: getattr(self, name) for name in PLAIN},
            "rounds": [list(astuple(one)) for one in self.rounds],
            "spent": asdict(self.spent),
            "plain": self.plain and asdict(self.plain),
            "mismatch": self.mismatch and asdict(self.mismatch),
            "steps": self.steps and asdict(self.steps),
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> DecodingRecord:
        """Rebuild from the JSON form."""
        return cls(
            **{name: entry[name] for name in PLAIN},
            rounds=tuple(Round(*one) for one in entry["rounds"]),
            spent=Spent(**entry["spent"]),
            plain=entry["plain"] and Spent(**entry["plain"]),
            mismatch=entry["mismatch"] and Mismatch(**entry["mismatch"]),
            steps=entry["steps"] and Steps(**entry["steps"]),
        )
