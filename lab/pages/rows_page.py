"""The tables of columns in docs/rows.md, from the schema: `python -m lab.pages.rows_page [--write docs/rows.md]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields

from espalier.harness.paths import ROOT
from espalier.harness.reports.frame import POINTS, ROWS, SAMPLES
from espalier.harness.settings import OMITTED, marked
from espalier.harness.specs.commands import command
from espalier.harness.specs.row_settings import COSTS, IN_ROWS, LEFT_OPEN, SECTIONS
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
        new = table(("column", "type", "meaning"), _lines(columns))
        text = _replaced(text, rf"^`{name}`[^\n]*:\n\n<!-- columns -->\n\n", new)
    header = ("block", "in every row", "where it is off its default", "open in published tables")
    return _replaced(text, r"^<!-- settings -->\n\n", table(header, _blocks()))


def _replaced(text: str, before: str, new: str) -> str:
    """Return the page with another table after the line that `before` matches."""
    old = re.search(rf"{before}((?:\|.*\n)+)", text, re.M)
    assert old is not None  # the page has the table
    return text[: old.start(1)] + new + text[old.end(1) :]


def _blocks() -> Iterator[tuple[str, ...]]:
    """Yield the settings of each block of a row, by the marks at the fields of its spec; costs are in italics."""
    for block, section in SECTIONS.items():
        omitted = marked(section, OMITTED)
        keys = [f"{block}.{field.name}" for field in fields(section) if field.name not in omitted]
        groups = (
            sorted(key for key in IN_ROWS if key.startswith(f"{block}.")),
            [key for key in keys if key not in IN_ROWS],
            [key for key in keys if key in LEFT_OPEN],
        )
        yield (f"`{block}`", *(_names(group) for group in groups))


def _names(keys: Iterable[str]) -> str:
    names = [f"`{key.partition('.')[2]}`" for key in keys]
    return ", ".join(f"*{n}*" if key in COSTS else n for key, n in zip(keys, names, strict=True))


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
