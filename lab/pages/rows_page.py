"""The tables of columns in docs/rows.md, from the schema: `python -m lab.pages.rows_page [--write docs/rows.md]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from espalier.harness.paths import ROOT
from espalier.harness.reports.frame import POINTS, ROWS, SAMPLES
from espalier.harness.specs.commands import command
from lab.pages.page_writer import print_or_write, table

#: Columns of each function of `espalier.results`, with type and meaning.
TABLES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "load": {name: column[:2] for name, column in ROWS.items()},
    "samples": SAMPLES,
    "compare": POINTS,
}


def page() -> str:
    """Return docs/rows.md with the tables of the schema; the text around them stays."""
    text = (ROOT / "docs" / "rows.md").read_text(encoding="utf-8")
    for name, columns in TABLES.items():
        # The table below the line that begins with the function's name.
        old = re.search(rf"^`{name}`[^\n]*:\n\n<!-- columns -->\n\n((?:\|.*\n)+)", text, re.M)
        assert old is not None  # the page has a table of each
        new = table(("column", "type", "meaning"), _lines(columns))
        text = text[: old.start(1)] + new + text[old.end(1) :]
    return text


def _lines(columns: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield a line for each column, one for a number with both ends of its interval."""
    for name, (dtype, meaning) in columns.items():
        if f"{name}_low" in columns:
            names = f"`{name}`, `{name}_low`, `{name}_high`"
            yield names, dtype, f"{meaning}; its 95 % interval"
        elif not name.endswith(("_low", "_high")):
            yield f"`{name}`", dtype, meaning


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    return print_or_write(page, "lab.pages.rows_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
