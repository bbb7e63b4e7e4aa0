"""Measurements of one sample: the counts and times of its row of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from espalier.harness.cost.facts import NO_WORK, Work


@dataclass(frozen=True)
class SampleRecord:
    """Telemetry of one sample.

    Attributes:
        sample: its id.
        visual: prunable visual tokens.
        text: other prompt tokens, newline and separator tokens included.
        special: newline and separator tokens alone; `visual + special` positions of the prompt hold images.
        work: cost before the decoder.
        requested: tokens to keep after each site, by the budget.
        kept: tokens really kept after each site.
        entering: visual tokens that entered each decoder layer.
        kv_entries: visual entries held in the KV cache after prefill, summed over layers.
        kv_bytes: bytes of the whole cache after prefill, divided by the rows of the batch.
        new_tokens: tokens generated, end of sequence included.
        attended: visual entries that layers from a decode site on attended to, mean over the steps that made the
            answer; None without such a site or step.
        ended: whether the answer ends with an end of sequence, the last of `new_tokens`; None if not checked.
        held: visual entries that each layer's cache holds after prefill, if they are evicted, or merged at each step;
            their sum is `kv_entries`. None: those of `entering`.
        held_special: newline and separator entries that each layer's cache holds, if they may be evicted; None: all of
            `special`.
        sliding: decoder layers with caches that hold a window of the prompt, from which nothing is evicted; None: none.
        pairs: pairs of tokens that attend in each decoder layer, where its mask is not the stack's own (visual tokens
            that see one another, windows); None: it is.
        full_pairs: the same for the prompt without reduction.
        spare: kept tokens that only fill up the count because the method's rule had no more; None if never reported.
        times_ms: milliseconds of vision, select, prefill (selection inside), decode and decode_per_token,
            each the batch's time divided by its rows.
        costs: its share of what the batch added to each meter that was on, and under `<meter>_variance` of the
            reading's variance.
        shared: phases that a stored prompt had completed before the answer began: their time is 0 here, and counted in
            the prompt.
        loop: the loop that generated the answer, `loop` (the engine's) or `generate` (the library's); None: the
            caller's.
        origin: (n,) original indices of the visual tokens alive in the last layer.
        origins: the same for each step of a denoised answer.
        kept_tokens: original indices of the visual tokens alive in the last layer, where a run records them.
        items: visual tokens of each picture and video, if the method chose in each by itself; None: in all together.
        accepted: the unreduced model's judgement of the answer, if requested: how many tokens are its likeliest
            (`greedy`), the sum of their probabilities (`sampling`), the position of the first that is not
            (`first_refusal`) and the widest `gap` in logits of such a token, both None if there is none.
        decoding: trace of a speculative decoder, as in `DecodingRecord.entry`
            (harness/decoding/speculative/decoding_record.py).
        canvases: of an answer on canvases, the `steps` of each and their `limit`; the entries and places that a place
            of it sees in each layer (`visible`); the `pairs` that attend there as a canvas is read for the next; and
            both if nothing is dropped (`full_visible`, `full_pairs`).
        denoising: steps of a denoised answer, as in `DenoisingRecord.entry`
            (harness/decoding/diffusion/denoising_record.py).
    """

    sample: str
    visual: int
    text: int
    requested: tuple[int, ...]
    kept: tuple[int, ...]
    entering: tuple[int, ...]
    kv_entries: int
    kv_bytes: int
    new_tokens: int
    special: int = 0
    attended: float | None = None
    ended: bool | None = None
    held: tuple[int, ...] | None = None
    held_special: tuple[int, ...] | None = None
    sliding: tuple[int, ...] | None = None
    pairs: tuple[int, ...] | None = None
    full_pairs: tuple[int, ...] | None = None
    spare: int | None = None
    kept_tokens: tuple[int, ...] | None = None
    items: tuple[int, ...] | None = None
    work: Work = NO_WORK
    times_ms: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    loop: str | None = None
    origin: Tensor | None = field(default=None, repr=False, compare=False)
    origins: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    accepted: Mapping[str, float | None] | None = None
    decoding: Mapping[str, Any] | None = None
    denoising: Mapping[str, Any] | None = None
    canvases: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class GeneratedBatch:
    """Answers of one batch: `ids` (B, T) new tokens only, padded after the end of sequence, and a record for each row.

    `logits` is (B, T, V) if the caller requested `output_logits`.
    """

    ids: Tensor
    records: tuple[SampleRecord, ...]
    logits: Tensor | None = None
    cache_lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class LoopOutput:
    """The output of a decoding loop.

    Attributes:
        ids: (B, T) new tokens.
        logits: of each, (B, V), if requested.
        steps: decoding steps that were run.
        loop: as in `SampleRecord`.
        end: () tokens until the last row ended; None: T.
        undrawn: () whether a row had no token with a probability; None: none was drawn.
    """

    ids: Tensor
    logits: tuple[Tensor, ...] | None
    steps: int
    loop: str | None = None
    end: Tensor | None = None
    undrawn: Tensor | None = None


def answer_lengths(ids: Tensor, ends: Sequence[int]) -> list[int]:
    """Return the number of tokens in each row's answer (B, T), its end of sequence included.

    Padding is not recognised by its own id: many checkpoints pad with the end of sequence.
    """
    is_end = _are_ends(ids, ends)
    ends_before = is_end.long().cumsum(1) - is_end.long()
    return (ends_before == 0).sum(1).tolist()


def rows_ended(ids: Tensor, ends: Sequence[int]) -> list[bool]:
    """Return whether each row of (B, T) contains an end of sequence."""
    return _are_ends(ids, ends).any(1).tolist()


def _are_ends(ids: Tensor, ends: Sequence[int]) -> Tensor:
    """Return (B, T) booleans. By methods of tensors: reports read records, and importing torch takes seconds."""
    return (ids.unsqueeze(-1) == ids.new_tensor(ends)).any(-1)
