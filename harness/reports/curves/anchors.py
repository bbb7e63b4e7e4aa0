"""Compare unpruned rows with the values that papers print (conf/anchors.csv).

Command: `python -m espalier.harness.reports.curves.anchors`.

A pruned model is only worth comparing with a paper's where the unpruned one agrees: within half a point, or the
prompts, pixels or scores are not the paper's.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.harness.config.benchmark_section import benchmark_spec
from espalier.harness.config.compose import CONF, compose_section
from espalier.harness.errors import UserError, plain_page
from espalier.harness.reports.curves.stored_rows import stored
from espalier.harness.specs.commands import command
from espalier.harness.specs.comparable import Row
from espalier.harness.specs.run_spec import ORIGINAL
from espalier.harness.store.files.folder_checks import existing_store
from espalier.harness.store.unparsed_mark import FOOTNOTE, is_marked, mark

#: Points that a number may be off.
NEAR = 0.5


@dataclass(frozen=True)
class Anchor:
    """A number that a paper prints of an unpruned model, and where.

    Attributes:
        name: of the preset that runs it (`+anchor=`).
        prompt: the set of prompts that stands behind it.
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


@dataclass(frozen=True)
class Beside:
    """An anchor and the row that measures it.

    Attributes:
        measured: in the paper's units; None where nothing ran.
        samples: how many were scored.
        whole: whether these are all of the benchmark.
    """

    anchor: Anchor
    measured: float | None = None
    samples: int | None = None
    whole: bool = True
    mark: str = ""

    @property
    def difference(self) -> float | None:
        """Return measured minus published."""
        return None if self.measured is None else self.measured - self.anchor.published

    @property
    def verdict(self) -> str:
        """Return what the difference means, in a word or two."""
        if self.difference is None:
            return "not run"
        # Both are printed with one decimal: half a point is half a point there, too.
        near = round(abs(self.difference), 6) <= NEAR
        return ("near" if near else "FAR") + ("" if self.whole else ", of a part")


def read_anchors(path: Path = CONF / "anchors.csv") -> list[Anchor]:
    """Return the anchors of a file.

    Raises:
        UserError: a line lacks a column, or its number is none.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for number, row in enumerate(rows, 2):
        try:
            texts = {key: value for key, value in row.items() if key not in ("anchor", "published")}
            found.append(Anchor(name=row["anchor"], published=float(row["published"]), **texts))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}, line {number}: no anchor: {error}; valid: as its first line"
            ) from error
    return found


def beside(anchors: Iterable[Anchor], rows: Iterable[Row]) -> list[Beside]:
    """Return each anchor with the newest row of its unpruned model, benchmark and set of prompts.

    A row of the whole benchmark goes before one of a part of it.

    Args:
        anchors: what papers print.
        rows: of a store, the oldest first.
    """
    rows = [row for row in rows if row["method"] == "none" and "settings" in row]
    return [_beside(anchor, rows) for anchor in anchors]


def _beside(anchor: Anchor, rows: Sequence[Row]) -> Beside:
    found = [
        row
        for row in rows
        if (row["model"], row["benchmark"]) == (anchor.model, anchor.benchmark)
        and row["settings"]["model"].get("prompt", ORIGINAL) == anchor.prompt
        and row["metrics"].get(anchor.metric, {}).get("value") is not None
    ]
    if not found:
        return Beside(anchor)
    whole = [row for row in found if row["settings"]["benchmark"]["limit"] is None]
    row = (whole or found)[-1]
    value = row["metrics"][anchor.metric]["value"] * scale_of(anchor)
    return Beside(anchor, value, row["n_samples"], bool(whole), mark(is_marked(row)))


def scale_of(anchor: Anchor) -> float:
    """Return by what papers multiply an anchor's metric, as the benchmark's file says. Cost: 0.1 s."""
    spec = benchmark_spec(compose_section("benchmark", anchor.benchmark), None)
    return spec.reported[anchor.metric].scale if anchor.metric in spec.reported else 1.0


def table(found: Sequence[Beside]) -> str:
    """Return the anchors as a table in Markdown."""
    lines = [
        "| model | prompts | benchmark | measured | published | difference | | samples | printed in |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for one in found:
        anchor = one.anchor
        measured = "" if one.measured is None else f"{one.measured:.1f}{one.mark}"
        difference = "" if one.difference is None else f"{one.difference:+.1f}"
        samples = "" if one.samples is None else f"{one.samples:,}"
        lines.append(
            f"| {anchor.model} | {anchor.prompt} | {anchor.benchmark} | {measured} | {anchor.published:.1f} | "
            f"{difference} | {one.verdict} | {samples} | [{anchor.paper}]({anchor.url}), table {anchor.table}, "
            f"{anchor.row}, {anchor.column} |"
        )
    if any(one.mark for one in found):
        lines += ["", f"{FOOTNOTE}."]
    return plain_page("\n".join(lines))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a number is far from its anchor, 2 and one line if there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="python -m espalier.harness.reports.curves.anchors", description=__doc__
    )
    parser.add_argument("--store", type=Path, default=Path("results"), help="the run store")
    options = parser.parse_args(argv)
    try:
        rows = [one.row for one in stored(existing_store(options.store))]
        found = beside(read_anchors(), rows)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found))
    return int(any(one.verdict.startswith("FAR") for one in found))


if __name__ == "__main__":
    sys.exit(main())
