"""Methods at equal tokens, equal prefill FLOPs and equal KV bytes: one column for each budget rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from espalier.harness.cost.budget import RULES
from espalier.harness.reports.curves.curve_points import FULL
from espalier.harness.reports.curves.figures import Plot, Series, marker, percent_spot
from espalier.harness.reports.curves.plot_style import INK, NOTE
from espalier.harness.reports.curves.stored_rows import StoredResult
from espalier.harness.reports.protocols.protocol_table import (
    BenchmarkRuns,
    Cell,
    ProtocolTable,
    grouped_runs,
    is_control,
    kept_text,
    nothing_to_show,
)
from espalier.harness.stats import Interval, by_unit, mean_interval

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
    rules = [rule for rule in RULES if any(group.rule == rule for group in groups)]
    if len(rules) < 2:
        raise nothing_to_show(
            "cost", "two budget rules", "-m method=none,random,fastv ratio=0.5 budget=kept,flops"
        )
    cells: dict[tuple[str, str, str, str], dict[str, Cell]] = {}
    for group in groups:
        full = _full_bytes(groups, group)
        for point, runs in group.points.items():
            name = point[0] + " (control)" * is_control(runs)
            line = cells.setdefault((group.model, group.benchmark, kept_text(point), name), {})
            row = group.result(runs[0]).row
            line[group.rule] = mean_interval(by_unit(group.scores(runs), group.compared.units))
            line[f"{group.rule} tokens"] = f"{row['tokens']['kept_final']:.1f}"
            line[f"{group.rule} FLOPs"] = row["flops"]["share_of_full"]
            line[f"{group.rule} bytes"] = row["memory"]["kv_bytes"] / full if full else None
    columns = [f"{rule}{cost}" for rule in rules for cost in ("", " tokens", " FLOPs", " bytes")]
    heads = ("model", "benchmark", "share", "method")
    lines: list[Mapping[str, Cell]] = [
        {**dict(zip(heads, key, strict=True)), **{name: line.get(name) for name in columns}}
        for key, line in cells.items()
    ]
    lines.sort(key=lambda line: (*(str(line[head]) for head in heads[:3]), -_best(line, rules)))
    return ProtocolTable("cost", "Equal tokens, FLOPs, bytes", WORDS, lines, _plots(lines, rules))


def _full_bytes(groups: Sequence[BenchmarkRuns], group: BenchmarkRuns) -> float | None:
    """Return the cache's bytes of the unpruned model on a group's benchmark; None if it did not run."""
    rows = (
        result.row
        for neighbour in groups
        if (neighbour.model, neighbour.benchmark) == (group.model, group.benchmark)
        for result in neighbour.compared.results
        if result.row["method"] == FULL
    )
    return next((float(row["memory"]["kv_bytes"]) for row in rows), None)


def _best(line: Mapping[str, Cell], rules: Sequence[str]) -> float:
    """Return the score under the last rule that the method reaches."""
    scores = [cell.value for rule in rules if isinstance(cell := line[rule], Interval)]
    return scores[-1] if scores else 0.0


def _plots(lines: Sequence[Mapping[str, Cell]], rules: Sequence[str]) -> list[Plot]:
    """Return a plot for each benchmark, share and rule; the methods of the first are the rows of all."""
    rows = {
        name: row for row, name in enumerate(dict.fromkeys(str(line["method"]) for line in lines))
    }
    names: dict[float, str] = {row: name for name, row in rows.items()}
    plots = []
    for title in dict.fromkeys((line["benchmark"], line["share"], line["model"]) for line in lines):
        part = [
            line for line in lines if (line["benchmark"], line["share"], line["model"]) == title
        ]
        for rule in rules:
            series = [
                Series(
                    label,
                    [
                        percent_spot(rows[str(line["method"])], cell)
                        for line in part
                        if str(line["method"]).endswith("(control)") == control
                        and isinstance(cell := line[rule], Interval)
                    ],
                    marker("s" if control else "o", color=NOTE if control else INK, zorder=4),
                    key=True,
                )
                for label, control in (("method", False), ("control", True))
            ]
            note = f"{title[0]}, {title[1]}"
            plots.append(Plot("dots", rule, series, note, values="score (%)", ticks=names))
    return plots
