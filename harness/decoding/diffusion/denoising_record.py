"""What a denoised answer leaves in its sample's record: counts of each step beside those of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from espalier.harness.decoding.diffusion.denoising_settings import Denoising
from espalier.harness.engine.record import Record


@dataclass(frozen=True)
class DenoisingRecord:
    """One sample's steps.

    Attributes:
        length: places of the answer.
        reveals: places unveiled at each step.
        requested: visual tokens to leave behind each site, as the step's budget asked, for each step.
        kept: those really left.
        entering: visual tokens that entered a decoder layer, mean over the layers, for each step; where the prompt was
            cached, those whose entries the answer's places attended to.
        prefix_cache: whether the prompt was run once and cached.
    """

    length: int
    reveals: tuple[int, ...]
    requested: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    entering: tuple[float, ...]
    prefix_cache: bool = False

    @property
    def path(self) -> str:
        """What a row calls the way in which the steps were run."""
        return "prefix_cache" if self.prefix_cache else "recomputed"

    def entry(self) -> dict[str, Any]:
        """Return what a journal keeps."""
        return {
            "length": self.length,
            "reveals": list(self.reveals),
            "requested": [list(step) for step in self.requested],
            "kept": [list(step) for step in self.kept],
            "entering": list(self.entering),
            "prefix_cache": self.prefix_cache,
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> DenoisingRecord:
        """Read what a journal kept."""
        return cls(
            int(entry["length"]),
            tuple(map(int, entry["reveals"])),
            tuple(tuple(map(int, step)) for step in entry["requested"]),
            tuple(tuple(map(int, step)) for step in entry["kept"]),
            tuple(map(float, entry["entering"])),
            bool(entry.get("prefix_cache", False)),
        )


def record_of(
    steps: Sequence[Record],
    how: Denoising,
    new_tokens: int,
    vision_ms: float,
    steps_ms: float,
    cached: Record | None = None,
) -> Record:
    """Return the record of one sample from those of its steps.

    What a prefill's record says of sites and layers is the last step's here. All steps together are the time of
    decoding; that of a prefill is the cached prompt's, and none without a cache.

    Args:
        steps: the sample's record of each step.
        how: the settings.
        new_tokens: of the answer, its end included.
        vision_ms: milliseconds of the sample before the decoder.
        steps_ms: milliseconds of all its steps.
        cached: the record of its prompt, if that was run once and cached.
    """
    last = steps[-1]
    before: Mapping[str, float] = {} if cached is None else cached.times_ms
    selecting = sum(step.times_ms["select"] for step in steps) + before.get("select", 0.0)
    told = DenoisingRecord(
        how.length,
        how.reveals,
        tuple(s.requested for s in steps),
        tuple(s.kept for s in steps),
        tuple(fmean(s.entering) for s in steps),
        cached is not None,
    )
    times = {
        "vision": vision_ms,
        "select": selecting,
        "prefill": before.get("prefill", 0.0),
        "decode": steps_ms,
        "decode_per_token": steps_ms / how.length,
    }
    return replace(
        last,
        text=last.text - how.length if cached is None else last.text,
        new_tokens=new_tokens,
        times_ms=times,
        shared=(),
        held=None if cached is None else last.held,
        denoising=told.entry(),
        origins=tuple(s.origin for s in steps if s.origin is not None),
    )
