"""Page of the benchmark of denoising runs: measured savings, FLOP savings and targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.bench.bench_page import CORES, LOAD, goal, measured_on

#: Targets: the measured share of the FLOP saving, and the share of a step for scores, selection and merging.
REACHED, METHOD = 0.85, 0.02

#: Share of a whole step that a reduced one may take beyond its FLOPs, after a cached prompt.
STEP = 0.1

HEAD = (
    "| method | kept | FLOPs | time | speed-up, allowed | speed-up, measured | saving, measured of promised "
    "| run, s | step, ms | scores and merging, of a step | between steps, ms a step |"
)

Row = Mapping[str, Any]


def page(result: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    rows, answer = result["rows"], result["answer"]
    unreduced = rows[0]
    lines = [
        "# Denoising with merged tokens: measured against what its FLOPs promise",
        "",
        f"Written by `make bench-diffusion` on {measured_on(result['conditions'], CORES, LOAD)}; processor time of "
        f"one thread. {result['rounds']} rounds, each with one answer of every side, in changing order.",
        "",
        f"`{result['instance']}`: LaViDa's adapter, view sizes and vocabulary around a scaled text stack with random "
        f"weights; {unreduced['tokens']:,} tokens, {unreduced['visual']} of them visual, {answer['max_new_tokens']} of "
        f"the answer, which {answer['steps']} steps unveil. `{result['method']}`, whose first step is whole, and "
        "random tokens before the decoder at every step, the control.",
        "",
        "FLOPs and time are shares of the whole model's run, from the prompt on: decoder and head as "
        "`harness/cost` counts them, which leaves out what a method computes itself. Speed-ups and savings (1 - "
        "time over 1 - FLOPs) are geometric means over the rounds with 95 % intervals (Student's t on the "
        "logarithms); the rest are medians, steps those after the first. Where four steps share a choice (`every=4`), "
        "a step's time is the mean of these.",
        "",
        HEAD,
        "| --- |" + " ---: |" * 10,
        *map(_line, rows),
        "",
        *(
            line
            for name, variant in result.get("variants", {}).items()
            for line in _variant(name, variant)
        ),
        "## Targets",
        "",
        *targets(rows),
        *(
            line
            for name, variant in result.get("variants", {}).items()
            for line in step_targets(name, variant)
        ),
    ]
    return "\n".join(lines)


def _variant(name: str, rows: Sequence[Row]) -> list[str]:
    table = [HEAD, "| --- |" + " ---: |" * 10, *map(_line, rows)]
    return [f"## {name.capitalize()}", "", *table, ""]


def step_targets(name: str, rows: Sequence[Row]) -> list[str]:
    """Return a line for each reduced step: its time as a share of an unreduced step's, and the share of its FLOPs."""
    unreduced = rows[0]["step_ms"]
    return [
        goal(
            f"{row['kept']:.0%} kept, {name}: a step takes at most {row['promised_step']:.0%} of a whole one, its "
            f"FLOPs, and {STEP:.0%}",
            row["step_ms"] / unreduced <= min(row["promised_step"] + STEP, 1),
            f"{row['step_ms'] / unreduced:.0%}",
        )
        for row in rows[1:]
    ]


def targets(rows: Sequence[Row]) -> list[str]:
    """Return a line with the result for each target; controls have none."""
    merged = [row for row in rows if row["name"].startswith("d3tom")]
    return [
        *(
            goal(
                f"{row['kept']:.0%} kept: at least {REACHED:g} of the promised saving",
                row["reached"] >= REACHED,
                f"{row['reached']:.2f}",
            )
            for row in merged
        ),
        *(
            goal(
                f"{row['kept']:.0%} kept: scores and merging at most {METHOD:.0%} of a step",
                row["method_share"] <= METHOD,
                f"{row['method_share']:.2%}",
            )
            for row in merged
        ),
    ]


def _line(row: Row) -> str:
    gain = row["gain"]
    cells = [row["name"], f"{row['kept']:.1%}", f"{row['flops']:.1%}"]
    if row["reached"] is None:
        cells += ["100.0%", "", "", ""]
    else:
        cells += [f"{row['time']:.1%}", f"{gain['bound']:.2f}", f"{gain['ratio']:.2f}{_ends(gain)}"]
        cells.append(f"{row['reached']:.2f}{_reached_ends(row)}")
    cells += [f"{row['run_s']:.2f}", f"{row['step_ms']:.0f}"]
    cells += [f"{row['method_share']:.2%}", f"{row['loop_ms']:.1f}"]
    return f"| {' | '.join(cells)} |"


def _ends(gain: Row) -> str:
    if gain["low"] is None or gain["high"] is None:
        return ""
    return f" [{gain['low']:.2f}, {gain['high']:.2f}]"


def _reached_ends(row: Row) -> str:
    if row["reached_interval"] is None:
        return ""
    return " [{:.2f}, {:.2f}]".format(*row["reached_interval"])
