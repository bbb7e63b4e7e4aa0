"""How often two runs keep other tokens of the same sample: bf16 against fp32, another wording, another seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from espalier.harness.errors import UserError
from espalier.harness.evaluation.samples import Key
from espalier.harness.reports.curves.figures import Plot, Series, marker, percent_spot
from espalier.harness.reports.curves.plot_style import INK
from espalier.harness.reports.curves.stored_rows import StoredResult, with_settings
from espalier.harness.reports.protocols.protocol_table import Cell, ProtocolTable
from espalier.harness.specs.comparable import amount, brief, differences, identity
from espalier.harness.specs.comparable import name as name_of
from espalier.harness.specs.row_settings import COSTS
from espalier.harness.stats import Interval, mean_interval

WORDS = (
    "Pairs of runs with `engine.kept=true` that differ in one setting: the share of samples with other kept tokens, "
    "the mean share of tokens that both sets have in common (of their union), the share of answers that "
    "differ, and both scores; in percent, with 95 % intervals. Sets are those of the last decoder layer.",
)

#: Settings that only name the files read.
FILES = ("benchmark.files",)


def kept_sets(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return how kept sets and answers differ, for each pair of runs of a method that differ in one setting.

    Raises:
        UserError: no two such runs recorded what they kept.
    """
    groups: dict[Any, list[tuple[StoredResult, dict[Key, tuple[frozenset[int], str]]]]] = {}
    for result in with_settings(results)[0]:
        sets = {
            (entry["task"], entry["doc_id"]): (
                frozenset(entry["record"]["kept_tokens"]),
                entry["answer"],
            )
            for entry in result.journal()
            if entry.get("record", {}).get("kept_tokens")
        }
        if sets and result.row["method"] != "none":
            groups.setdefault(identity(result.row, ("seed",)), []).append((result, sets))
    lines: list[Mapping[str, Cell]] = []
    for group in groups.values():
        for (first, first_sets), (second, second_sets) in combinations(group, 2):
            changes = _changes(first, second)
            shared = sorted(first_sets.keys() & second_sets.keys())
            if len(changes) == 1 and shared:
                pairs = [(first_sets[key], second_sets[key]) for key in shared]
                lines.append(_line(first, second, changes, pairs))
    if not lines:
        raise UserError(
            "--protocol=kept needs runs of one method that differ in one setting and recorded what they kept; valid: "
            "-m method=fastv ratio=0.9 engine.kept=true model.dtype=float32,bfloat16"
        )
    lines.sort(key=lambda line: (str(line["difference"]), str(line["model"]), str(line["method"])))
    return ProtocolTable("kept", "Do kept tokens stay the same?", WORDS, lines, [_plot(lines)])


def _changes(first: StoredResult, second: StoredResult) -> dict[str, list[str]]:
    """Return the settings in which two runs differ, and their seeds if these do."""
    changes = {
        key: values
        for key, values in differences([first.row, second.row]).items()
        if key not in COSTS and key not in FILES
    }
    seeds = [str(result.row["seed"]) for result in (first, second)]
    return changes | ({"seed": seeds} if seeds[0] != seeds[1] else {})


def _line(
    first: StoredResult,
    second: StoredResult,
    changes: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[tuple[frozenset[int], str], tuple[frozenset[int], str]]],
) -> dict[str, Cell]:
    ((setting, values),) = changes.items()
    other_sets = np.array([float(ours[0] != theirs[0]) for ours, theirs in pairs])
    common = np.array(
        [len(ours[0] & theirs[0]) / len(ours[0] | theirs[0]) for ours, theirs in pairs]
    )
    other_answers = np.array([float(ours[1] != theirs[1]) for ours, theirs in pairs])
    headline = first.row["extra"]["headline"]
    return {
        "model": first.row["model"],
        "benchmark": first.row["benchmark"],
        "method": name_of(first.row),
        "removed": amount(first.row),
        "difference": f"{setting}: {' / '.join(map(brief, values))}",
        "other sets": mean_interval(other_sets),
        "in common": mean_interval(common),
        "other answers": mean_interval(other_answers),
        "first": float(first.row["metrics"][headline]["value"]),
        "second": float(second.row["metrics"][headline]["value"]),
        "samples": len(pairs),
    }


def _plot(lines: Sequence[Mapping[str, Cell]]) -> Plot:
    ticks: dict[float, str] = {
        row: f"{line['method']} {line['removed']} {line['difference']}"
        for row, line in enumerate(lines)
    }
    series = [
        Series(
            name,
            [
                percent_spot(row, cell)
                for row, line in enumerate(lines)
                if isinstance(cell := line[name], Interval)
            ],
            marker(shape, color=INK, markerfacecolor=face, zorder=4),
            key=True,
        )
        for name, shape, face in (("other sets", "o", INK), ("other answers", "s", "#FFFFFF"))
    ]
    return Plot("dots", "Samples that differ", series, values="share (%)", ticks=ticks)
