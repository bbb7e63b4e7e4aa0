"""The answer to a question, with its cost and the kept visual tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from espalier.harness.api.visible_tokens import VisibleChat
from espalier.harness.cost.facts import ModelFacts
from espalier.harness.cost.flops import sample_flops
from espalier.harness.decoding.diffusion.answer_flops import canvas_flops, run_flops
from espalier.harness.decoding.speculative.decoding_record import DecodingRecord
from espalier.harness.decoding.speculative.speculative_summary import steady_rounds
from espalier.harness.engine.record import SampleRecord
from espalier.harness.errors import UserError
from espalier.methods.base import Method, TokenReducer

if TYPE_CHECKING:
    from espalier.harness.api.notebook_figure import Drawing
    from espalier.harness.engine.session_setup import PrefillScores


@dataclass(frozen=True)
class Flops:
    """FLOPs of the language model's prefill, or of all steps of a denoised answer (docs/rows.md lists what is counted).

    Attributes:
        share: `exact` divided by `full`.
        exact: FLOPs spent.
        full: FLOPs of the same computation without reduction.
    """

    share: float
    exact: int
    full: int


@dataclass(frozen=True)
class SpeculativeDecoding:
    """Statistics of a speculative decoder; the answer itself is the target's.

    Attributes:
        accepted: share of drafted tokens that the target accepted; None if nothing was drafted.
        tokens_per_target_forward: answer tokens per forward of the target.
        rounds: forwards of the target.
        draft_visual: number of visual tokens in the draft's prompt.
        speedup: end-to-end time of plain decoding divided by the time of this answer; None unless
            `apply(..., compare=True)`.
        degraded: why the target continued without the draft; None if it did not.
    """

    accepted: float | None
    tokens_per_target_forward: float
    rounds: int
    draft_visual: float
    speedup: float | None
    degraded: str | None


@dataclass(frozen=True, eq=False)
class TokenValues:
    """A value for each visual token of a question, as an array (`numpy.asarray`) and as a picture.

    Attributes:
        values: (N,) in fp32, in the order of `kept_indices`; NaN for tokens without a value, such as those dropped
            before the layer.
        title: what they are.
    """

    values: np.ndarray = field(repr=False)
    title: str
    _caption: str = field(repr=False)
    _visible: VisibleChat = field(repr=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the values."""
        return np.array(self.values, dtype=dtype)

    def show(self, path: str | PathLike[str] | None = None) -> Drawing:
        """Draw each picture or frame with the values in colour; tokens without a value are faded out.

        Args:
            path: also save the figure to this file; its suffix selects the format.

        Raises:
            UserError: the question had no pictures, or the file cannot be written.
        """
        # Imported here: matplotlib takes a third of a second.
        from espalier.harness.api.overlay import captioned, draw_values

        return draw_values(self._visible, self.values, captioned(self.title, self._caption), path)


@dataclass(frozen=True, eq=False)
class RecordedPrefill:
    """What `ask(..., record=True)` keeps of one question's prefill.

    Attributes:
        attention: (N,) of each decoder layer.
        scores: (layer, (N,)) of each place where the method states scores.
    """

    attention: tuple[np.ndarray, ...]
    scores: tuple[tuple[int, np.ndarray], ...]

    @classmethod
    def of_row(
        cls, scores: PrefillScores | None, row: int, rows: int, count: int
    ) -> RecordedPrefill | None:
        """Return the values of one of `rows` questions, with `count` visual tokens; of beams the first."""
        if scores is None:
            return None
        place = row * len(scores.attention[0]) // rows
        return cls(
            tuple(layer[place, :count].numpy() for layer in scores.attention),
            tuple((layer, table[place, :count].numpy()) for layer, table in scores.scores),
        )


@dataclass(frozen=True)
class Answer:
    """The result of `ask`.

    Attributes:
        question: text of the question, without media.
        text: text of the answer.
        tokens: number of generated tokens, including end of sequence.
        visual: number of visual tokens in the prompt that a method may drop.
        kept: number of visual tokens in the last decoder layer, for a denoised answer in its last step; equal to
            `visual` if only a draft drops tokens.
        kept_indices: indices of the kept tokens among the `visual`, ascending.
        kept_by_step: kept indices of each step of a denoised answer; empty for other models.
        ratio: removed share, counted by the budget's rule; for a speculative decoder the share its draft dropped.
        cache: share of the visual cache entries that remains after the prefill; 1 unless a compressor evicts entries.
        flops: FLOPs of the prefill.
        times_ms: milliseconds of vision, prefill (includes select), select, decode and decode_per_token; for a batch,
            its time divided by its number of rows.
        decoding: statistics of a speculative decoder; None for other methods.
        record: all measurements.
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
    decoding: SpeculativeDecoding | None
    record: SampleRecord = field(repr=False)
    _visible: VisibleChat = field(repr=False, compare=False)
    _prefill: RecordedPrefill | None = field(default=None, repr=False, compare=False)

    def attention(self, layer: int) -> TokenValues:
        """Return the attention that the prompt's last token pays each visual token in a decoder layer, mean over heads.

        Args:
            layer: decoder layer, counted from 0; -1 is the last one.

        Raises:
            UserError: `ask` had no `record=True`, or the model has no such layer.
        """
        tables = self._recorded("attention").attention
        is_layer = isinstance(layer, int) and not isinstance(layer, bool)
        if not is_layer or not -len(tables) <= layer < len(tables):
            raise UserError(f"attention(layer={layer!r}): valid: 0 to {len(tables) - 1}")
        number = layer % len(tables)
        return TokenValues(
            tables[number], f"attention in layer {number}", self.caption, self._visible
        )

    def scores(self, layer: int | None = None) -> TokenValues:
        """Return the method's scores of the visual tokens: a reducer's own, or a compressor's mean over heads.

        Args:
            layer: the decoder layer after the method's site, or with the shortened cache; 0 for a place before the
                decoder; None: the last place.

        Raises:
            UserError: `ask` had no `record=True`, or the method states no scores, or none in this layer.
        """
        tables = dict(self._recorded("scores").scores)
        if not tables:
            raise UserError(
                "scores(): this method states no scores; valid: a method that ranks tokens, such as fastv; your own: "
                "Plan(kept, scores=...)"
            )
        number = next(reversed(tables)) if layer is None else layer
        if number not in tables:
            raise UserError(f"scores(layer={layer!r}): valid: {', '.join(map(str, tables))}, None")
        return TokenValues(tables[number], f"scores at layer {number}", self.caption, self._visible)

    def _recorded(self, name: str) -> RecordedPrefill:
        if self._prefill is None:
            raise UserError(f"{name}(): nothing was recorded; valid: ask(..., record=True)")
        return self._prefill

    def show(self, path: str | PathLike[str] | None = None, *, step: int | None = None) -> Drawing:
        """Draw each picture or frame with the areas of dropped tokens faded out.

        A picture that the model gets both as a global view and in tiles of higher resolution is drawn twice. The result
        is a matplotlib figure, which notebooks display.

        Args:
            path: also save the figure to this file; its suffix selects the format.
            step: step of a denoised answer, counted from 0; None: the last.

        Raises:
            UserError: the question had no pictures, the step does not exist, or the file cannot be written.
        """
        # Imported here: matplotlib takes a third of a second.
        from espalier.harness.api.overlay import captioned, draw

        kept, suffix = self.kept_indices, ""
        if step is not None:
            if not self.kept_by_step:
                raise UserError(f"show(step={step!r}): this answer was not denoised; valid: None")
            last = len(self.kept_by_step) - 1
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= last:
                raise UserError(f"show(step={step!r}): valid: 0 to {last}, or None for the last")
            kept, suffix = self.kept_by_step[step], f" in step {step}"
        title = f"{len(kept)} of {self.visual} visual tokens kept{suffix}"
        return draw(self._visible, kept, captioned(title, self.caption), path)

    @property
    def caption(self) -> str:
        """Question and answer in a line."""
        return f"{self.question} → {self.text}"


def flops_of(record: SampleRecord, facts: ModelFacts, method: Method) -> Flops:
    """Return the FLOPs of one sample's prefill, or of the whole run of a denoised answer."""
    if record.denoising is not None:
        assert isinstance(
            method, TokenReducer
        )  # only denoisers and reducers run on diffusion models
        flops = run_flops(method, facts, record)
    elif record.canvases is not None:
        flops = canvas_flops(facts, record)
    else:
        pairs = record.pairs or (), record.full_pairs or ()
        counts = record.entering, record.visual, record.text
        flops = sample_flops(facts, *counts, record.work, *pairs)
    return Flops(flops.share_of_full, flops.exact.language, flops.exact_full.language)


def decoding_of(record: SampleRecord) -> SpeculativeDecoding | None:
    """Return the statistics of a speculative decoder; None for other methods."""
    if record.decoding is None:
        return None
    summary = DecodingRecord.from_entry(record.decoding)
    rounds, plain = steady_rounds([summary]), summary.plain
    return SpeculativeDecoding(
        accepted=rounds.acceptance if any(round_.drafted for round_ in rounds.rounds) else None,
        tokens_per_target_forward=rounds.tokens_per_target_forward if rounds.rounds else 1.0,
        rounds=len(summary.rounds),
        draft_visual=summary.draft_visual,
        speedup=None if plain is None else plain.total / summary.spent.total,
        degraded=summary.degraded,
    )
