"""Page of the benchmark of cache compression: one table per length, and the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.bench.bench_page import CORES, LOAD, THREADS, goal, measured_on

MIB = 2**20

#: A side at a length, `CacheRow.entry`.
Row = Mapping[str, Any]

#: Targets: the share of a prefill for scores, and the share of the allowed gain at the longest prompts.
SCORING, REACHED, TIGHT = 0.01, 0.85, 0.9

HEAD = (
    "| cache | ratio | prefill, ms | scores, ms (of prefill) | evicting, ms (above the whole cache) | step, ms "
    "| cache, MiB | visual entries held | gain allowed | gain measured | of it |"
)


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    rows = result["rows"]
    lines = [
        "# Cache compression: measured against what its bytes allow",
        "",
        f"Written by `make bench-kv` on {measured_on(result['conditions'], CORES, THREADS, LOAD)}. "
        "Medians over the rounds, in which every side answers once; a gain "
        "is that of a step over the same round's with the whole cache (geometric mean, 95 % interval), and is "
        "allowed by the bytes that it reads: weights and cache.",
    ]
    for instance, tokens in dict.fromkeys((row["instance"], row["tokens"]) for row in rows):
        part = [row for row in rows if (row["instance"], row["tokens"]) == (instance, tokens)]
        lines += ["", f"## {tokens:,} tokens, {part[0]['visual']:,} of them visual", ""]
        lines += [
            f"`{instance}`; a step reads {part[0]['weights'] / MIB:.0f} MiB of weights; a copy moved "
            f"{part[0]['rate'] / 1e9:.1f} GB/s, read and written both counted.",
            "",
            HEAD,
        ]
        lines += ["| --- |" + " ---: |" * 10, *map(_line, part)]
    return "\n".join([*lines, "", "## Targets", "", *targets(rows)])


def targets(rows: Sequence[Row]) -> list[str]:
    """Return a line with the result for each target."""
    steps = [row for row in rows if row["asked"] == "steps"]
    longest = max((row["tokens"] for row in steps), default=0)
    evicted = [row for row in rows if row["ratio"] > 0]
    long = [row for row in evicted if row["asked"] == "steps" and row["tokens"] == longest]
    lines = [
        goal(
            f"{row['name']} {row['ratio']:g}, {row['tokens']:,} tokens: scores at most {SCORING:.0%} of prefill",
            row["scoring_share"] <= SCORING,
            f"{row['scoring_share']:.2%}",
        )
        for row in evicted
        if row["asked"] == "scores"
    ]
    lines += [
        goal(
            f"{row['name']} {row['ratio']:g}, {row['tokens']:,} tokens: at least {REACHED:g} of the allowed gain",
            row["reached"] >= REACHED,
            f"{row['reached']:.2f}",
        )
        for row in long
        if row["ratio"] >= TIGHT
    ]
    exact = all(
        abs(row["visual_share"] - (1 - row["ratio"])) * row["visual"] < 1 for row in evicted
    )
    lines.append(goal("visual entries held are 1 - ratio to an entry", exact, "all sides"))
    if long:
        full_bytes = next(row for row in steps if row["tokens"] == longest and row["ratio"] == 0)[
            "kv_bytes"
        ]
        worst = max(row["above_bytes"] for row in long)
        lines.append(
            goal(
                f"{longest:,} tokens: less than the whole cache once more while evicting",
                worst < full_bytes,
                f"{worst / MIB:.0f} of {full_bytes / MIB:.0f} MiB",
            )
        )
    return lines


def _line(row: Row) -> str:
    # Answers for timing scores have only a few tokens, so step times are not given.
    stepped = row["asked"] == "steps"
    step = f"{row['step_ms']:.2f}" if stepped else ""
    if row["ratio"] == 0:
        cells = [row["name"], "0", f"{row['prefill_ms']:.0f}", "", "", step]
        return _cells([*cells, f"{row['kv_bytes'] / MIB:.1f}", "1", "", "", ""])
    low, high = row["gain"]["low"], row["gain"]["high"]
    spread = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    gains = [
        f"{row['allowed']:.2f}",
        f"{row['gain']['ratio']:.2f}{spread}",
        f"{row['reached']:.2f}",
    ]
    return _cells(
        [
            row["name"],
            f"{row['ratio']:g}",
            f"{row['prefill_ms']:.0f}",
            f"{row['scoring_ms']:.1f} ({row['scoring_share']:.2%})",
            f"{row['evicting_ms']:.0f} ({row['above_bytes'] / MIB:.0f} MiB)",
            step,
            f"{row['kv_bytes'] / MIB:.1f}",
            f"{row['visual_share']:.4f}",
            *(gains if stepped else ("", "", "")),
        ]
    )


def _cells(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"
