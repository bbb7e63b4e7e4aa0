"""Write the records of a pass's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from espalier.harness.cost.row_work import Work
from espalier.harness.engine.prefill import Prefill
from espalier.harness.engine.record import Record
from espalier.harness.engine.sites.site import Sites

PHASES = ("vision", "select", "prefill", "decode")


@dataclass(frozen=True)
class RecordSummary:
    """Data of a record that is known only at the end of an answer.

    Attributes:
        times_ms: of each sample.
        new_tokens: of each row.
        ended: of each row, as `attended`, as in `Record`.
        cache_bytes: of the whole cache after the prefill.
        shared: phases that a stored prompt had completed.
        held: visual entries that each layer's cache holds, for each row; None: those that entered it.
        held_special: newline and separator entries that each layer's cache holds, for each row; None: all.
        loop: as in `Record`.
    """

    times_ms: Mapping[str, float]
    new_tokens: Sequence[int]
    ended: Sequence[bool]
    attended: Sequence[float | None]
    cache_bytes: int
    shared: tuple[str, ...] = ()
    held: Sequence[Sequence[int]] | None = None
    held_special: Sequence[Sequence[int]] | None = None
    loop: str | None = None


def sample_times(totals_ms: Mapping[str, float], rows: int, n_steps: int) -> dict[str, float]:
    """Return each sample's share of a batch's time, and the time of one step."""
    times = {name: totals_ms.get(name, 0.0) / rows for name in PHASES}
    times["decode_per_token"] = times["decode"] / max(n_steps, 1)
    return times


def make_records(
    prefill: Prefill, sites: Sequence[Sites], summary: RecordSummary
) -> tuple[Record, ...]:
    """Return a record for each sample of the batch."""
    layout, beams, last_stage = prefill.layout, prefill.beams, prefill.stage
    depth, spare = len(prefill.setup.adapter.decoder.layers), prefill.spares()
    records = []
    for row, sample in enumerate(prefill.samples):
        beam = row * beams
        entering = tuple(prefill.stage_of(layer).counts[beam] for layer in range(depth))
        held_entries = (
            entering if summary.held is None else tuple(layer[beam] for layer in summary.held)
        )
        held_special = tuple(layer[beam] for layer in summary.held_special or ())
        record = Record(
            sample=sample,
            visual=layout.counts[row],
            text=layout.text[row],
            special=layout.special[row],
            work=_work(prefill, sites, row),
            requested=prefill.requested[row],
            kept=tuple(kept[row] for kept in prefill.kept),
            entering=entering,
            kv_entries=sum(held_entries),
            held=None if summary.held is None else held_entries,
            held_special=held_special or None,
            kv_bytes=summary.cache_bytes // (layout.rows * beams),
            new_tokens=summary.new_tokens[row],
            ended=summary.ended[row],
            attended=summary.attended[row],
            spare=spare[row],
            times_ms=summary.times_ms,
            shared=summary.shared,
            loop=summary.loop,
            origin=last_stage.origin[beam, : last_stage.counts[beam]].cpu(),
        )
        records.append(record)
    return tuple(records)


def _work(prefill: Prefill, sites: Sequence[Sites], row: int) -> Work:
    """Return the cost of a row before the decoder."""
    work, extra = prefill.layout.work[row], len(prefill.setup.extra_blocks)
    work = work._replace(
        reprojected=prefill.reprojected[row],
        extra_tokens=extra * work.tokens,
        extra_pairs=extra * work.pairs,
    )
    for group in sites:
        work = work.plus(group.work(row))
    return work
