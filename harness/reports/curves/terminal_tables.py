"""Tables of rows in a terminal, never wider than it, and how results of speculative decoding are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from espalier.harness.specs.comparable import Row, amount

#: Spaces between two columns.
GAP = 2


@dataclass(frozen=True)
class TerminalColumn:
    """A column: its heading, and its cells from the top."""

    heading: str
    cells: tuple[str, ...]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Its width with the gap after it."""
        return max(map(cell_len, (self.heading, *self.cells))) + GAP


def fits(columns: Sequence[TerminalColumn], width: int) -> bool:
    """Return whether the columns fit into `width` in one table."""
    return sum(column.width for column in columns) - GAP <= width


def side_by_side(columns: Sequence[TerminalColumn], title: str | None = None) -> Table:
    """Return one table of the columns, each as wide as it needs to be."""
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0)
    )
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def stacked_tables(
    names: Sequence[TerminalColumn],
    groups: Sequence[Sequence[TerminalColumn]],
    width: int,
    title: str,
) -> list[RenderableType]:
    """Return a title and as many tables as needed to fit the width, each with the row names.

    Args:
        names: columns that name the rows; the longest wraps if they leave too little room.
        groups: value columns; if not all fit, each group starts a new table and continues in another where necessary.
        width: of the terminal.
        title: above all tables.
    """
    room = max(width - sum(column.width for column in names), width // 3)
    columns = [column for group in groups for column in group]
    parts: list[list[TerminalColumn]] = []
    for group in [columns] if fits(columns, room) else groups:
        parts.append([])
        for column in group:
            if parts[-1] and not fits([*parts[-1], column], room):
                parts.append([])
            parts[-1].append(column)
    tables: list[RenderableType] = ["", Text(title, style="italic")]
    for part in parts:
        table = side_by_side([*names, *part])
        if not fits([*names, *part], width):
            longest = max(range(len(names)), key=lambda index: names[index].width)
            table.columns[longest].no_wrap = False
            table.columns[longest].overflow = "fold"
        tables += [table, ""]
    return tables[:-1]


def _figure(key: str, form: str) -> Callable[[Row], str]:
    """Return a function from a row to the text of a figure of its `extra.speculative`."""

    def text(row: Row) -> str:
        value = row["extra"]["speculative"].get(key)
        return "-" if value is None else format(value, form)

    return text


def _differ(row: Row) -> str:
    """Return the number of answers that differ from plain decoding."""
    mismatches = row["extra"]["speculative"]["mismatches"]
    return "-" if mismatches is None else f"{mismatches['answers']}/{mismatches['compared']}"


#: The texts of a row's figures, by heading.
FIGURES: Mapping[str, Callable[[Row], str]] = {
    "gamma": _figure("gamma", "g"),
    "draft sees": _figure("draft_visual", ".4g"),
    "T_p": _figure("target_ms", ".2f"),
    "T_p of a round": _figure("window_ms", ".2f"),
    "T_q": _figure("draft_ms", ".2f"),
    "accepted": _figure("acceptance", ".1%"),
    "tokens/forward": _figure("tokens_per_target_forward", ".2f"),
    "mean run": _figure("mean_run", ".2f"),
    "decode": _figure("speedup_decode", ".2f"),
    "predicted": _figure("speedup_predicted", ".2f"),
    "by windows": _figure("speedup_predicted_window", ".2f"),
    "end to end": _figure("speedup_end_to_end", ".2f"),
    "per device": _figure("speedup_per_device", ".2f"),
    "overlap": _figure("overlap_efficiency", ".0%"),
    "differ": _differ,
}

#: Headings of each table where one table would be too wide: drafting, times, gains.
GROUPS = (
    ("gamma", "draft sees", "accepted", "tokens/forward", "mean run"),
    ("T_p", "T_p of a round", "T_q", "overlap", "differ"),
    ("decode", "predicted", "by windows", "end to end", "per device"),
)


def tables_of(rows: Sequence[Row], name: Callable[[Row], str], width: int) -> list[RenderableType]:
    """Return one line for each speculatively decoded row, in one table or several; empty if there is none.

    Args:
        rows: of the store.
        name: function that returns a row's name.
        width: of the terminal.
    """
    decoded = [row for row in rows if row["extra"].get("speculative")]
    if not decoded:
        return []
    title = "speculative decoding: times in milliseconds; speed-ups over plain decoding (docs/speculative.md)"
    benchmarks = tuple(row["benchmark"] for row in decoded)
    names, values = _columns(decoded, name)
    columns = [TerminalColumn("benchmark", benchmarks, "left"), *names, *values.values()]
    if fits(columns, width):
        return [side_by_side(columns, title)]
    parts: list[RenderableType] = ["", Text(title, style="italic")]
    for benchmark in dict.fromkeys(benchmarks):
        group = [row for row in decoded if row["benchmark"] == benchmark]
        names, values = _columns(group, name)
        groups = [[values[heading] for heading in headings] for headings in GROUPS]
        parts += stacked_tables(names, groups, width, f"{group[0]['model']}, {benchmark}")
    return parts


def _columns(
    rows: Sequence[Row], name: Callable[[Row], str]
) -> tuple[list[TerminalColumn], dict[str, TerminalColumn]]:
    """Return the columns that name rows, and those of figures by heading."""
    names = [
        TerminalColumn("method", tuple(map(name, rows)), "left"),
        TerminalColumn("ratio", tuple(map(amount, rows)), "left"),
    ]
    return names, {
        head: TerminalColumn(head, tuple(map(text, rows))) for head, text in FIGURES.items()
    }


def latency_gains(row: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as fast as the unreduced model a row's phases are, where both sides were clocked."""
    gains = (row["extra"].get("latency") or {}).get("gain") or {}
    return {phase: gain["ratio"] for phase, gain in gains.items() if gain is not None}


def latency_text(row: Mapping[str, Any]) -> str:
    """Return these with their 95 % intervals, `prefill 1.85x [1.80, 1.91], step 1.10x`; empty without them."""
    texts = []
    for phase, ratio in latency_gains(row).items():
        gain = row["extra"]["latency"]["gain"][phase]
        ends = (
            ""
            if None in (gain["low"], gain["high"])
            else f" [{gain['low']:.2f}, {gain['high']:.2f}]"
        )
        texts.append(f"{phase} {ratio:.2f}x{ends}")
    return ", ".join(texts)


def summary_lines(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (heading, text) lines on one row's decoding."""
    block = row["extra"].get("speculative")
    if not block:
        return []
    texts = {head: text(row) for head, text in FIGURES.items()}
    lines = []
    # Plain decoding has no draft.
    if block["acceptance"] is not None:
        visual = f"{row['tokens']['visual']:.4g}"
        lines.append(("draft sees", f"{texts['draft sees']} of {visual} visual tokens"))
    lines += [
        (
            "drafts",
            f"gamma {texts['gamma']}, {texts['accepted']} of the tokens judged accepted, "
            f"{texts['tokens/forward']} tokens a target forward, mean run {texts['mean run']}",
        ),
        (
            "speed-up",
            f"decode {texts['decode']}x (predicted {texts['predicted']}x), end to end {texts['end to end']}x, "
            f"{texts['per device']}x a device; both sides busy {texts['overlap']}",
        ),
        ("differ", f"{texts['differ']} answers from plain decoding"),
    ]
    degraded = block["degraded"]
    if degraded["answers"]:
        lines.append(
            (
                "degraded",
                f"{degraded['answers']} answers finished by the target alone: {degraded['why']}",
            )
        )
    return lines
