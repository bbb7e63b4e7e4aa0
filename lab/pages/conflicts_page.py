"""docs/conflicts.md, written from the table of conflicts: `python -m lab.pages.conflicts_page [--write <file>]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from espalier.harness.paths import ROOT
from espalier.harness.specs.commands import command
from espalier.harness.specs.conflicts import CONFLICTS
from lab.pages.page_writer import print_or_write, table

PAGE = ROOT / "docs" / "conflicts.md"

HEAD = """\
# Settings that exclude each other

`make docs` writes this page from [harness/specs/conflicts.py](../harness/specs/conflicts.py), which commands read
before they load a model.
`method=?` marks the methods that run on a model.
"""


def page() -> str:
    """Return the page: a table for each group of conflicts."""
    parts = [HEAD]
    for group, conflicts in CONFLICTS.items():
        rows = [(f"`{each.setting}`", _text(each.why), _text(each.valid)) for each in conflicts]
        title = f"{group[0].upper()}{group[1:]}"
        parts.append(f"## {title}\n\n{table(('setting', 'why', 'valid'), rows)}")
    return "\n".join(parts)


def _text(template: str) -> str:
    """Return a part of a line with the names of its values in italics."""
    return re.sub(r"\{([\w.]+)\}", r"*\1*", template.removeprefix(": ").replace("<", "&lt;"))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    return print_or_write(page, "lab.pages.conflicts_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
