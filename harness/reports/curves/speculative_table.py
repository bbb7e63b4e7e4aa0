"""How rows of speculative decoding are shown: a few lines of one row, or one line each of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from espalier.harness.reports.curves.terminal_columns import Column, below, beside, fits

#: Column headings, and where a row's `extra.speculative` has them.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("gamma", "gamma", "g"),
    ("draft sees", "draft_visual", ".4g"),
    ("T_p", "target_ms", ".2f"),
    ("T_p of a round", "window_ms", ".2f"),
    ("T_q", "draft_ms", ".2f"),
    ("accepted", "acceptance", ".1%"),
    ("tokens/forward", "tokens_per_target_forward", ".2f"),
    ("mean run", "mean_run", ".2f"),
    ("decode", "speedup_decode", ".2f"),
    ("predicted", "speedup_predicted", ".2f"),
    ("by windows", "speedup_predicted_window", ".2f"),
    ("end to end", "speedup_end_to_end", ".2f"),
    ("per device", "speedup_per_device", ".2f"),
    ("overlap", "overlap_efficiency", ".0%"),
)

#: Headings that stand in one table where all of them would be too wide: what was drafted, its times, what it gains.
GROUPS = (
    ("gamma", "draft sees", "accepted", "tokens/forward", "mean run"),
    ("T_p", "T_p of a round", "T_q", "overlap", "differ"),
    ("decode", "predicted", "by windows", "end to end", "per device"),
)


def figures(row: Mapping[str, Any]) -> list[str]:
    """Return a row's figures in the order of `COLUMNS`, then how many answers differ from plain decoding."""
    block = row["extra"]["speculative"]
    found = [_number(block.get(key), form) for _, key, form in COLUMNS]
    mismatches = block["mismatches"]
    differ = "-" if mismatches is None else f"{mismatches['answers']}/{mismatches['compared']}"
    return [*found, differ]


def headings() -> list[str]:
    """Return the headings of `figures`."""
    return [heading for heading, _, _ in COLUMNS] + ["differ"]


def tables_of(rows: Sequence[Mapping[str, Any]], name: Any, width: int) -> list[RenderableType]:
    """Return one line for each row that was decoded speculatively, in one table or several; nothing if none was.

    Args:
        rows: of the store.
        name: what a row is called.
        width: of the terminal.
    """
    decoded = [row for row in rows if row["extra"].get("speculative")]
    if not decoded:
        return []
    title = "speculative decoding: times in milliseconds; speed-ups over plain decoding (docs/speculative.md)"
    benchmarks = tuple(row["benchmark"] for row in decoded)
    columns = [Column("benchmark", benchmarks, "left"), *_names(decoded, name), *_values(decoded)]
    if fits(columns, width):
        return [beside(columns, title)]
    parts: list[RenderableType] = ["", Text(title, style="italic")]
    for benchmark in dict.fromkeys(benchmarks):
        group = [row for row in decoded if row["benchmark"] == benchmark]
        values = _values(group)
        groups = [[one for one in values if one.heading in headings] for headings in GROUPS]
        parts += below(_names(group, name), groups, width, f"{group[0]['model']}, {benchmark}")
    return parts


def _names(rows: Sequence[Mapping[str, Any]], name: Any) -> list[Column]:
    return [
        Column("method", tuple(name(row) for row in rows), "left"),
        Column("ratio", tuple(f"{row['ratio']:g}" for row in rows), "left"),
    ]


def _values(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    found = zip(*map(figures, rows), strict=True)
    return [Column(heading, cells) for heading, cells in zip(headings(), found, strict=True)]


def lines(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what one row says of its decoding: (heading, text)."""
    block = row["extra"].get("speculative")
    if not block:
        return []
    shown = dict(zip(headings(), figures(row), strict=True))
    found = [
        (
            "drafts",
            f"gamma {shown['gamma']}, {shown['accepted']} of the tokens judged accepted, "
            f"{shown['tokens/forward']} tokens a target forward, mean run {shown['mean run']}",
        ),
        (
            "speed-up",
            f"decode {shown['decode']}x (predicted {shown['predicted']}x), end to end {shown['end to end']}x, "
            f"{shown['per device']}x a device; both sides busy {shown['overlap']}",
        ),
        ("differ", f"{shown['differ']} answers from plain decoding"),
    ]
    lost = block["degraded"]
    if lost["answers"]:
        found.append(
            ("degraded", f"{lost['answers']} answers finished by the target alone: {lost['why']}")
        )
    return found


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
