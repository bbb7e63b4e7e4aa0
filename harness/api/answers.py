"""An answer, what it cost and what the model saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from textwrap import shorten
from typing import TYPE_CHECKING

from harness.api.seen import Seen
from harness.decoding.records import DecodingRecord
from harness.decoding.summary import steady_rounds
from harness.engine.record import Record
from harness.facts import ModelFacts
from harness.measure.flops import sample_flops

if TYPE_CHECKING:
    from harness.api.drawing import Drawing


#: Characters of question and answer that stand above a picture.
LONGEST = 70


@dataclass(frozen=True)
class Flops:
    """Arithmetic of the language model's prefill (docs/rows.md says what is counted).

    Attributes:
        share: `exact` over `full`.
        exact: FLOPs that were spent.
        full: FLOPs of the same prompt without reduction.
    """

    share: float
    exact: int
    full: int


@dataclass(frozen=True)
class Decoding:
    """How a speculative decoder came to the answer, which is the target's own.

    Attributes:
        accepted: share of drafted tokens that the target let stand; None where nothing was drafted.
        tokens_per_target_forward: tokens of the answer for each forward of the target.
        rounds: forwards of the target.
        draft_visual: visual tokens that the draft saw.
        speedup: plain decoding's time over this one's, end to end; None unless `apply(..., compare=True)`.
        degraded: why the target went on alone; None if it did not.
    """

    accepted: float | None
    tokens_per_target_forward: float
    rounds: int
    draft_visual: float
    speedup: float | None
    degraded: str | None


@dataclass(frozen=True)
class Answer:
    """What `ask` returns.

    Attributes:
        question: what was asked, the words alone.
        text: the answer.
        tokens: tokens generated, end of sequence included.
        visual: visual tokens of the prompt that a method may drop.
        kept: those alive in the last decoder layer; all of them where a draft alone does without.
        kept_indices: their places among the `visual`, ascending.
        ratio: share removed as the budget's rule counts it; of a speculative decoder, the share its draft did without.
        cache: share of the visual cache entries that the prefill left for decoding; 1 unless a compressor evicts some.
        flops: of the prefill.
        times_ms: milliseconds of vision, prefill (selection inside), select, decode and decode_per_token; of a batch,
            its time divided by its rows.
        decoding: what a speculative decoder did; None otherwise.
        record: everything that was measured.
    """

    question: str
    text: str
    tokens: int
    visual: int
    kept: int
    kept_indices: tuple[int, ...] = field(repr=False)
    ratio: float
    cache: float
    flops: Flops
    times_ms: Mapping[str, float] = field(repr=False)
    decoding: Decoding | None
    record: Record = field(repr=False)
    _seen: Seen = field(repr=False, compare=False)

    def show(self, path: str | PathLike[str] | None = None) -> Drawing:
        """Draw each picture or frame with the places of dropped tokens faded out.

        A picture that the model sees both as a whole and in tiles of higher resolution is drawn twice. Notebooks show
        what is returned, a matplotlib figure.

        Args:
            path: a file to save it to as well; its ending says in which format.

        Raises:
            UserError: there was nothing to see, or the file cannot be written.
        """
        # matplotlib takes a third of a second to import.
        from harness.api.drawing import draw, drawable

        said = shorten(f"{self.question} → {self.text}", LONGEST, placeholder=" ...")
        title = f"{self.kept} of {self.visual} visual tokens kept"
        title = f"{title}\n{said}" if drawable(said) else title
        return draw(self._seen, self.kept_indices, title, path)


def flops_of(record: Record, facts: ModelFacts) -> Flops:
    """Return the arithmetic of one sample's prefill."""
    counted = sample_flops(facts, record.entering, record.visual, record.text, record.work)
    return Flops(counted.share_of_full, counted.exact.language, counted.exact_full.language)


def decoding_of(record: Record) -> Decoding | None:
    """Return what a decoder did, in short."""
    if record.decoding is None:
        return None
    telling = DecodingRecord.from_entry(record.decoding)
    rounds, plain = steady_rounds([telling]), telling.plain
    return Decoding(
        accepted=rounds.acceptance if any(one.drafted for one in rounds.rounds) else None,
        tokens_per_target_forward=rounds.tokens_per_target_forward if rounds.rounds else 1.0,
        rounds=len(telling.rounds),
        draft_visual=telling.draft_visual,
        speedup=None if plain is None else plain.total / telling.spent.total,
        degraded=telling.degraded,
    )
