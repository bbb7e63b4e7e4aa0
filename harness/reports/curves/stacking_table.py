"""What a reducer and a compressor save separately and together: prefill and cache in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from espalier.harness.reports.curves.cache_rows import CacheResult
from espalier.harness.reports.curves.curve_points import FULL
from espalier.harness.specs.comparable import name

HEAD = (
    *("method", "ratio", "cache ratio", "score", "tokens", "entries"),
    *("prefill FLOPs", "prefill ms", "cache", "of the whole"),
)


def stacking(by_benchmark: Mapping[str, Sequence[CacheResult]]) -> Iterator[str]:
    """Yield one table for each benchmark; shares refer to the unpruned model's row, which is first if it exists."""
    for benchmark, cells in by_benchmark.items():
        metric = cells[0].row["extra"]["headline"]
        yield "\n".join(
            [
                f"### {benchmark}\n",
                f"{metric} in percent on {cells[0].row['n_samples']} samples.\n",
                f"| {' | '.join(HEAD)} |",
                "| --- |" + " ---: |" * (len(HEAD) - 1),
                *(f"| {' | '.join(_line(cell, cells))} |" for cell in cells),
                "",
            ]
        )


def _line(cell: CacheResult, cells: Sequence[CacheResult]) -> tuple[str, ...]:
    row = cell.row
    tokens, memory, time = row["tokens"], row["memory"], row["time"]
    unpruned = next((result.row for result in cells if result.row["method"] == FULL), None)
    entries = tokens["kv_entries"]
    # A compressor alone stores its share as the ratio.
    evicts_only = cell.evicted > 0 and not row["extra"]["sites"]
    return (
        name(row).replace(f" cache_ratio={cell.evicted:g}", ""),
        "-" if evicts_only else f"{row['ratio']:g}",
        f"{cell.evicted:g}",
        cell.percent,
        _percent(tokens["kept_final"] / tokens["visual"]),
        "-" if unpruned is None else _percent(entries / unpruned["tokens"]["kv_entries"]),
        _percent(row["flops"]["share_of_full"]),
        "-" if time["prefill_ms"] is None else f"{time['prefill_ms']:.1f}",
        f"{memory['kv_bytes'] / 1024:.0f} KiB",
        "-" if unpruned is None else _percent(memory["kv_bytes"] / unpruned["memory"]["kv_bytes"]),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
