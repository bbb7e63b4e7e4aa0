"""List benchmarks, check whether they can run here, and prefetch what they need from the network.

`check <name>` reads its data (from the hub's cache, or --path), gives two samples
to a small model and scores the answers; `check all` does that for each; `prefetch <name>` downloads what a machine
without network will need, and checks it. Overrides as for `espalier run` follow the name; `model=<name>` adds a
checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from espalier.harness.config.benchmark_section import is_own_data
from espalier.harness.config.group_lists import choices, read_choice
from espalier.harness.config.group_table import listing
from espalier.harness.errors import print_lines
from espalier.harness.specs.commands import command, command_parser
from espalier.harness.specs.hub_cache import downloads, go_offline


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 1 if a check failed and 2 if the line is wrong."""
    parser = command_parser(
        "benchmarks",
        __doc__,
        "list",
        "check pope --path /data/POPE",
        "prefetch pope model=llava15_7b",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print a table of conf/benchmark")
    check = commands.add_parser("check", help="check whether it can run here")
    check.add_argument("name", help="a benchmark, or all")
    check.add_argument("--path", type=Path, help="folder of its data set (benchmark.path)")
    fetch = commands.add_parser("prefetch", help="download what it needs, and check it")
    fetch.add_argument("name", help="a benchmark")
    for subparser in (check, fetch):
        subparser.add_argument("overrides", nargs="*", metavar="key=value", help="model=llava15_7b")
    options = parser.parse_args(argv)
    if options.command == "check":
        return _check(options)
    if options.command == "list":
        print(listing("benchmark"), end="")
        return 0
    # torch and lmms-eval take seconds to import, and lists need neither.
    from espalier.harness.tools.benchmarks.hub_prefetch import prefetch

    return prefetch(options.name, options.overrides)


def _check(options: argparse.Namespace) -> int:
    downloads.set(False)
    go_offline()
    # torch and lmms-eval take seconds to import, and --help needs neither; both read the variables above.
    from espalier.harness.tools.benchmarks.benchmark_check import check

    # Own data have no place until the user names it.
    with_place = (
        name for name in choices("benchmark") if not is_own_data(read_choice("benchmark", name))
    )
    names = [*with_place] if options.name == "all" else [options.name]
    failed = 0
    for name in names:
        findings, prompt = check(name, options.path, options.overrides)
        failed += any(finding.status == "failed" for finding in findings)
        for finding in findings:
            print_lines(f"{name:<24} {finding.name:<10} {finding.status:<8} {finding.detail}")
        if prompt is not None and len(names) == 1:
            print(f"{name:<24} {'prompt':<10} {'':<8} {prompt!r}")
    if len(names) > 1:
        print(f"{len(names) - failed} of {len(names)} benchmarks can run here")
    return 1 if failed else 0
