"""The tables of docs/serve.md that follow from the code: `python -m lab.pages.serve_page [--write docs/serve.md]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from espalier.harness.paths import ROOT
from espalier.harness.specs.commands import command
from espalier.methods.base import TokenReducer
from espalier.serve.families import FAMILIES
from espalier.serve.setting import method_class, names, reason_of
from lab.pages.page_writer import print_or_write, table

#: A generated part of the page.
PART = re.compile(r"(<!-- (.*?) -->\n).*?(<!-- end -->\n)", re.DOTALL)

PAGE = ROOT / "docs" / "serve.md"

#: Rows of `python -m lab.bench.serve_bench`.
MEASURED = sorted((ROOT / "lab" / "measured" / "serving").glob("*.csv"))


def page() -> str:
    """Return the page with its table of methods and its times."""
    text = PAGE.read_text(encoding="utf-8")
    parts = {"what is served": served_table, "under load": load_list}
    return PART.sub(lambda part: f"{part[1]}{parts[part[2]]()}{part[3]}", text)


def load_list() -> str:
    """Return how each model was measured, and a line for each method."""
    texts = [path.with_suffix(".md").read_text(encoding="utf-8") for path in MEASURED]
    return "\n".join(text.partition("\n|")[0] for text in texts)


def served_table() -> str:
    """Return the table: methods that are served, then reducers that are not, with the reason."""
    reasons = {name: reason_of(name) for name in names()}
    fitting = [f"`{name}`" for name, reason in reasons.items() if reason is None]
    rows = [("served", ", ".join(fitting))]
    refused: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None and issubclass(method_class(name), TokenReducer):
            # One line for all decoder layers.
            refused.setdefault(re.sub(r"layer \d+", "layer k", reason), []).append(f"`{name}`")
    rows += [(reason, ", ".join(members)) for reason, members in sorted(refused.items())]
    return f"{table(('', 'methods'), rows)}\nModel classes: {', '.join(f'`{name}`' for name in FAMILIES)}.\n"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    return print_or_write(page, "lab.pages.serve_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
