"""How rows of speculative decoding are shown: a few lines of one row, or one line each of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

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


def table_of(rows: Sequence[Mapping[str, Any]], name: Any) -> Table | None:
    """Return one line for each row that was decoded speculatively; None if none was.

    Args:
        rows: of the store.
        name: what a row is called.
    """
    decoded = [row for row in rows if row["extra"].get("speculative")]
    if not decoded:
        return None
    title = "speculative decoding: times in milliseconds; speed-ups over plain decoding (docs/speculative.md)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("benchmark", "method", "ratio"):
        table.add_column(heading, no_wrap=True)
    for heading in headings():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in decoded:
        table.add_row(row["benchmark"], name(row), f"{row['ratio']:g}", *figures(row))
    return table


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
