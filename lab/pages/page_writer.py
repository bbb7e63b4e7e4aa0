"""Shared by the pages of docs/: tables, and the command that prints or writes a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from espalier.harness.store.files.folder_checks import check_file


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, one line per row; `|` in cells is replaced by a slash."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def print_or_write(
    page: Callable[[], str], module: str, about: str | None, argv: Sequence[str] | None
) -> int:
    """Print a page, or write it with `--write`; `about` is the help text of `python -m <module>`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--write", type=Path, help="file to replace")
    options = parser.parse_args(argv)
    if options.write is not None:
        check_file("--write", options.write)
    if options.write is None:
        print(page(), end="")
    else:
        options.write.write_text(page(), encoding="utf-8")
    return 0
