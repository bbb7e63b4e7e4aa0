"""Draw accuracy against tokens kept, of the rows of a store: <out>.png, .svg and .md with a panel a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.cost.budget import RULES
from espalier.harness.errors import UserError, print_lines
from espalier.harness.paths import DEFAULT_STORE
from espalier.harness.reports.curves.comparison import read_panels
from espalier.harness.reports.curves.curve_files import SUFFIXES, write_panels
from espalier.harness.reports.curves.stored_rows import WHERE
from espalier.harness.settings import choice
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.store.files.folder_checks import check_files, existing_store


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Draw curves from a store; exit code 2 and one line if that fails."""
    parser = command_parser(
        "curves",
        __doc__,
        "--benchmarks seedling_rec --out curves/mine",
        "--store other --benchmarks gqa,pope --model llava15_7b --out curves/llava",
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the run store")
    parser.add_argument("--benchmarks", help="names, separated by commas (default: all)")
    parser.add_argument(
        "--out", type=Path, default=Path("report/curves"), help="path without suffix"
    )
    parser.add_argument("--model", help="required if the store has several models")
    parser.add_argument("--rule", default="kept", help="budget rule of the rows (default: kept)")
    parser.add_argument("--where", action="append", default=[], help=WHERE)
    options = parser.parse_args(argv)
    check_files("--out", options.out, SUFFIXES)
    benchmarks = [name for name in (options.benchmarks or "").split(",") if name]
    if options.benchmarks is not None and not benchmarks:
        raise UserError(
            f"--benchmarks={options.benchmarks!r} is empty; valid: names, separated by commas"
        )
    store = existing_store(options.store)
    choice("--rule", options.rule, RULES)
    panels = read_panels(
        store, benchmarks, options.model, options.rule, where=options.where, swept=True
    )
    paths = write_panels(panels, options.out)
    for panel in panels:
        for note in panel.notes:
            print_lines(f"{panel.benchmark}: {note}", file=sys.stderr)
    print_lines(*paths)
    return 0
