"""The table of docs/first_gpu_run.md: `python -m lab.pages.anchors_page [--write docs/first_gpu_run.md]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from espalier.harness.paths import ROOT
from espalier.harness.reports.tables.anchors import read_anchors
from espalier.harness.specs.commands import command
from lab.pages.page_writer import print_or_write, table

PAGE = ROOT / "docs" / "first_gpu_run.md"

#: The generated part of the page.
PART = re.compile(r"(<!-- anchors -->\n).*?(<!-- end -->\n)", re.DOTALL)


def page() -> str:
    """Return the page with the scores of conf/anchors.csv."""
    text = PAGE.read_text(encoding="utf-8")
    return PART.sub(lambda part: f"{part[1]}{anchors_table()}{part[2]}", text)


def anchors_table() -> str:
    """Return a line for each anchor; all are in percent."""
    lines = [
        (
            f"`{anchor.name}`",
            f"`{anchor.model}`",
            f"`{anchor.benchmark}`",
            f"`{anchor.metric}`",
            f"{anchor.published:g}",
            f"[{anchor.paper}]({anchor.url}), table {anchor.table}, {anchor.row}",
        )
        for anchor in read_anchors()
    ]
    return table(("`+anchor=`", "model", "benchmark", "metric", "percent", "printed in"), lines)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    return print_or_write(page, "lab.pages.anchors_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
