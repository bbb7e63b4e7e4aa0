"""Compare unpruned results with the values that papers print (conf/anchors.csv).

Command: `python -m espalier.harness.reports.tables.anchors`.

A pruned model can only be compared with a paper if the unpruned model agrees with it: a difference above half a point
means that prompts, pixels or scores differ from the paper's.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.composer import compose_section
from espalier.harness.errors import plain_page
from espalier.harness.paths import CONF, DEFAULT_STORE
from espalier.harness.reports.curves.stored_rows import read_results
from espalier.harness.reports.tables.cell_runs import RULE, CellRun
from espalier.harness.reports.tables.cell_settings import compared_settings, row_settings
from espalier.harness.specs.commands import PlainParser, command
from espalier.harness.specs.comparable import Row
from espalier.harness.store.files.folder_checks import existing_store
from espalier.harness.store.row_text import FOOTNOTE, is_marked, mark

#: Heads of the table.
HEADS = (
    "| model | prompts | benchmark | measured | published | difference | | samples | printed in |",
    "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | --- |",
)

#: Columns of an anchor's result.
MEASURED = ("measured", "difference", "samples", "mark")

#: Largest difference in points that counts as agreement.
NEAR = 0.5


@dataclass(frozen=True)
class Anchor:
    """A score that a paper prints for an unpruned model, with its source.

    Attributes:
        name: of the preset that runs it (`+anchor=`).
        prompt: name of the prompt set.
        published: in the paper's units.
    """

    name: str
    model: str
    prompt: str
    benchmark: str
    metric: str
    published: float
    paper: str
    url: str
    table: str
    row: str
    column: str


def read_anchors(path: Path = CONF / "anchors.csv") -> list[Anchor]:
    """Return the anchors of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    anchors = []
    for row in rows:
        texts = {key: value for key, value in row.items() if key not in ("anchor", "published")}
        anchors.append(Anchor(name=row["anchor"], published=float(row["published"]), **texts))
    return anchors


def compare_anchors(anchors: Iterable[Anchor], rows: Iterable[Row]) -> pd.DataFrame:
    """Return each anchor with the newest result of its unpruned model, benchmark and prompt set, by all its settings.

    A result on the complete benchmark is preferred to one on a part of it. Columns: the anchor's; `verdict`;
    `measured` in the paper's units, `difference` from what is published, `samples` and `mark` of the result.

    Args:
        anchors: what papers print.
        rows: of a store, oldest first.
    """
    rows = [row for row in rows if row["method"] == "none" and "settings" in row]
    lines = [{**asdict(anchor), **_measured(anchor, rows)} for anchor in anchors]
    columns = [*Anchor.__annotations__, "verdict", *MEASURED]
    return pd.DataFrame(lines, columns=columns, dtype=object).replace({np.nan: None})


def _measured(anchor: Anchor, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the verdict on an anchor and, if a result measures it, that result's columns."""
    of_cell = [
        row
        for row in rows
        if (row["model"], row["benchmark"]) == (anchor.model, anchor.benchmark)
        and row["metrics"].get(anchor.metric, {}).get("value") is not None
    ]
    expected = compared_settings(run_of(anchor))
    differences = [expected.difference(row_settings(row["settings"])) for row in of_cell]
    candidates = [row for row, unlike in zip(of_cell, differences, strict=True) if not unlike]
    if not candidates:
        return {"verdict": f"not run ({differences[-1]})" if differences else "not run"}
    complete = [row for row in candidates if row["settings"]["benchmark"]["limit"] is None]
    row = (complete or candidates)[-1]
    spec = benchmark_spec(compose_section("benchmark", anchor.benchmark))
    value = row["metrics"][anchor.metric]["value"] * (
        spec.reported[anchor.metric].scale if anchor.metric in spec.reported else 1.0
    )
    difference = value - anchor.published
    # Both have one decimal; rounding keeps a difference of exactly half a point at half a point.
    near = round(abs(difference), 6) <= NEAR
    verdict = ("near" if near else "FAR") + ("" if complete else ", of a part")
    measured = value, difference, row["n_samples"], mark(is_marked(row))
    return {"verdict": verdict, **dict(zip(MEASURED, measured, strict=True))}


def run_of(anchor: Anchor) -> CellRun:
    """Return the run of an anchor, as its preset sets it."""
    overrides = {"model": anchor.model, "model.prompt": anchor.prompt, "method": "none"}
    cell = {"benchmark": anchor.benchmark, "ratio": 0, "budget": RULE}
    return CellRun(overrides | cell, "", scale=1.0)


def table(comparisons: pd.DataFrame) -> str:
    """Return the anchors as a table in Markdown."""
    lines = [*HEADS]
    for anchor in comparisons.itertuples():
        measured = anchor.measured is not None
        cells = (
            *(anchor.model, anchor.prompt, anchor.benchmark),
            f"{anchor.measured:.1f}{anchor.mark}" if measured else "",
            f"{anchor.published:.1f}",
            f"{anchor.difference:+.1f}" if measured else "",
            anchor.verdict,
            f"{anchor.samples:,}" if measured else "",
            f"[{anchor.paper}]({anchor.url}), table {anchor.table}, {anchor.row}, {anchor.column}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    if any(comparisons["mark"]):
        lines += ["", f"{FOOTNOTE}."]
    return plain_page("\n".join(lines))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a score is far from its anchor, 2 and one line if there is nothing to read."""
    parser = PlainParser(
        prog="python -m espalier.harness.reports.tables.anchors", description=__doc__
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    options = parser.parse_args(argv)
    rows = [result.row for result in read_results(existing_store(options.store))]
    comparisons = compare_anchors(read_anchors(), rows)
    print(table(comparisons))
    return int(comparisons["verdict"].str.startswith("FAR").any())


if __name__ == "__main__":
    sys.exit(main())
