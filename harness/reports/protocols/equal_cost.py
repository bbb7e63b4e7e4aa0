"""Methods at equal tokens, equal prefill FLOPs and equal KV bytes: one column for each budget rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from espalier.harness.cost.budget import RULES
from espalier.harness.reports.curves.curve_points import FULL
from espalier.harness.reports.curves.figures import NOTE, Plot, Series, marker
from espalier.harness.reports.frame import StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    Cell,
    Line,
    ProtocolTable,
    frame_of,
    grouped_runs,
    kept_text,
    method_text,
    nothing_to_show,
    spots,
)
from espalier.harness.stats import Interval, by_unit, mean_interval

HEADS = ("model", "benchmark", "share", "method")

WORDS = (
    "The same share under several budget rules: `kept` counts tokens after the last site, `flops` is the exact prefill "
    "cost of dropping that share before layer 0, `kv_bytes` the share of the visual cache. For each rule the score in "
    "percent with its 95 % interval, and what the runs achieved: tokens after the last site, FLOPs of the decoder's "
    "prefill and bytes of the cache in percent of the unpruned model's. A method without an entry acts too late for "
    "the rule's share: such a run is refused, with the shares in reach.",
)


def equal_cost(results: Sequence[StoredResult]) -> ProtocolTable:
    """Return scores and costs of each method at each share by budget rule.

    Raises:
        UserError: there is one budget rule only.
    """
    groups = grouped_runs(results)
    rules = [rule for rule in RULES if any(group.row["budget_rule"] == rule for group in groups)]
    if len(rules) < 2:
        raise nothing_to_show(
            "cost", "two budget rules", "-m method=none,random,fastv ratio=0.5 budget=kept,flops"
        )
    # The bytes of the unpruned model's cache by model and benchmark, where it ran under any rule.
    full_bytes: dict[tuple[str, str], float] = {}
    for group in groups:
        for run in group.runs:
            if run.row["method"] == FULL:
                key = run.row["model"], run.row["benchmark"]
                full_bytes.setdefault(key, float(run.row["memory"]["kv_bytes"]))
    columns = [f"{rule}{cost}" for rule in rules for cost in ("", " tokens", " FLOPs", " bytes")]
    lines: dict[tuple[str, ...], dict[str, Cell]] = {}
    for group in groups:
        for point, runs in group.points.items():
            row = runs[0].row
            rule, place = row["budget_rule"], (row["model"], row["benchmark"])
            heads = dict(
                zip(HEADS, (*place, kept_text(point), method_text(point, runs)), strict=True)
            )
            line = lines.setdefault(tuple(heads.values()), {**heads, **dict.fromkeys(columns)})
            line[rule] = mean_interval(by_unit(group.scores(runs), group.units))
            line[f"{rule} tokens"] = f"{row['tokens']['kept_final']:.1f}"
            line[f"{rule} FLOPs"] = row["flops"]["share_of_full"]
            full = full_bytes.get(place)
            line[f"{rule} bytes"] = row["memory"]["kv_bytes"] / full if full else None

    def rank(line: Line) -> tuple[Any, ...]:
        """Return the place of a line, with the best score under the last rule that its method reaches first."""
        scores = [cell.value for rule in rules if isinstance(cell := line[rule], Interval)]
        return *(str(line[head]) for head in HEADS[:3]), -(scores[-1] if scores else 0.0)

    ranked = frame_of(sorted(lines.values(), key=rank))
    return ProtocolTable("cost", "Equal tokens, FLOPs, bytes", WORDS, ranked, _plots(ranked, rules))


def _plots(lines: pd.DataFrame, rules: Sequence[str]) -> list[Plot]:
    """Return a plot for each benchmark, share and rule; the methods of the first are the rows of all."""
    rows, names = pd.factorize(lines["method"])
    lines = lines.assign(row=rows, control=lines["method"].str.endswith("(control)"))
    ticks: dict[float, str] = dict(enumerate(names))
    plots = []
    for (benchmark, share, _), part in lines.groupby(["benchmark", "share", "model"], sort=False):
        methods, controls = part[~part["control"]], part[part["control"]]
        for rule in rules:
            series = [
                Series(name, spots(group["row"], group[rule]), look, key=True)
                for name, group, look in (
                    ("method", methods, marker("o", zorder=4)),
                    ("control", controls, marker("s", color=NOTE, zorder=4)),
                )
            ]
            note = f"{benchmark}, {share}"
            plots.append(Plot("dots", rule, series, note, values="score (%)", ticks=ticks))
    return plots
