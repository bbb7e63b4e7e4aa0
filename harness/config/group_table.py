"""`method=?` and the like: the choices of a config group as a table on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from espalier.harness.config.group_lists import Section, choices, comment, read_choice
from espalier.harness.config.name_source import descriptions


def listing(group: str) -> str:
    """Return a table of a group's choices, one line each, and a hint at further ones. Cost: one read of each file."""
    names = choices(group)
    if group == "method":
        variants = (", ".join(read_choice(group, name).get("variants", ())) for name in names)
        methods = zip(names, variants, map(partial(comment, group), names), strict=True)
        hint = "method.variant=<one of its variants>: official, the released code, or paper; the first is the default"
        return f"{_table((group, 'variants', ''), [*methods])}\n{hint}\n"
    if group != "benchmark":
        files = [(name, comment(group, name)) for name in names]
        return _table((group, ""), [*files, *_without_file(group)])
    head = ("benchmark", "title", "kind", "samples", "needs")
    rows = [_line(name, read_choice(group, name)) for name in names]
    hint = "benchmark=task:<name>: any other task of lmms-eval with written answers, by its own metrics"
    return f"{_table(head, rows)}\n{hint}\n"


def _without_file(group: str) -> Iterable[tuple[str, str]]:
    """Return the configs that are made from results/papers or conf/anchors.csv, each with what it runs."""
    if group not in ("experiment", "anchor"):
        return ()
    return descriptions(group).items()


def _line(name: str, section: Section) -> tuple[str, ...]:
    samples = section["dataset"]["samples"]
    return (
        name,
        section["title"] or "",
        section["kind"],
        "" if samples is None else f"{samples:,}",
        ", ".join(section["needs"]),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides: list[Callable[[str, int], str]] = [
        partial(str.rjust) if title == "samples" else partial(str.ljust) for title in head
    ]
    return "".join(
        "  ".join(
            side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )
