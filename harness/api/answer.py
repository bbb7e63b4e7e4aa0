"""An answer, what it cost and what the model saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from textwrap import shorten
from typing import TYPE_CHECKING

from espalier.harness.api.visible_tokens import Seen
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import sample_flops
from espalier.harness.decoding.diffusion.denoising_summary import run_flops
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculative_summary import steady_rounds
from espalier.harness.engine.record import Record
from espalier.harness.errors import UserError
from espalier.methods.base import Method, TokenReducer

if TYPE_CHECKING:
    from espalier.harness.api.overlay import Drawing


#: Characters of question and answer that stand above a picture.
LONGEST = 70


@dataclass(frozen=True)
class Flops:
    """Arithmetic of the language model's prefill, or of all steps of a denoised answer (docs/rows.md: what is counted).

    Attributes:
        share: `exact` over `full`.
        exact: FLOPs that were spent.
        full: FLOPs of the same without reduction.
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
        kept: those alive in the last decoder layer, of a denoised answer in its last step; all of them where a draft
            alone does without.
        kept_indices: their places among the `visual`, ascending.
        kept_by_step: the same of each step of a denoised answer; empty for others.
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
    kept_by_step: tuple[tuple[int, ...], ...] = field(repr=False)
    ratio: float
    cache: float
    flops: Flops
    times_ms: Mapping[str, float] = field(repr=False)
    decoding: Decoding | None
    record: Record = field(repr=False)
    _seen: Seen = field(repr=False, compare=False)

    def show(self, path: str | PathLike[str] | None = None, *, step: int | None = None) -> Drawing:
        """Draw each picture or frame with the places of dropped tokens faded out.

        A picture that the model sees both as a whole and in tiles of higher resolution is drawn twice. Notebooks show
        what is returned, a matplotlib figure.

        Args:
            path: a file to save it to as well; its ending says in which format.
            step: of a denoised answer, from 0; None: the last.

        Raises:
            UserError: there was nothing to see, no such step, or the file cannot be written.
        """
        # matplotlib takes a third of a second to import.
        from espalier.harness.api.overlay import draw, drawable

        said = shorten(f"{self.question} → {self.text}", LONGEST, placeholder=" ...")
        kept = self.kept_indices if step is None else self._kept_at(step)
        title = f"{len(kept)} of {self.visual} visual tokens kept"
        title += "" if step is None else f" in step {step}"
        title = f"{title}\n{said}" if drawable(said) else title
        return draw(self._seen, kept, title, path)

    def _kept_at(self, step: int) -> tuple[int, ...]:
        if not self.kept_by_step:
            raise UserError(f"show(step={step!r}): this answer was not denoised; valid: None")
        steps = len(self.kept_by_step)
        whole = isinstance(step, int) and not isinstance(step, bool)
        if not whole or not 0 <= step < steps:
            raise UserError(f"show(step={step!r}): valid: 0 to {steps - 1}, or None for the last")
        return self.kept_by_step[step]


def flops_of(record: Record, facts: ModelFacts, method: Method) -> Flops:
    """Return the arithmetic of one sample's prefill, or of all steps where it has none."""
    if record.denoising is not None:
        assert isinstance(method, TokenReducer)  # nothing else denoises
        counted = run_flops(method, facts, record)
    else:
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
