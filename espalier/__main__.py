"""`python -m espalier <command> ...`: each command is the `main` of one module, which is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from espalier.harness.errors import unknown_name
from espalier.harness.specs.commands import complain

#: Module of each command.
COMMANDS = {
    "benchmarks": "espalier.harness.cli.benchmarks",
    "calibrate": "espalier.harness.cli.calibrate",
    "convert": "espalier.harness.cli.convert",
    "curves": "espalier.harness.cli.curves",
    "doctor": "espalier.harness.cli.doctor",
    "report": "espalier.harness.cli.report",
    "store": "espalier.harness.cli.store",
    "sweep": "espalier.harness.cli.sweep",
    "tables": "espalier.harness.reports.tables.rebuild",
    "wandb": "espalier.harness.cli.wandb",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; exit code 2 and one line if there is none of that name."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: espalier <command> ...\ncommands: {', '.join(COMMANDS)}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        return complain(unknown_name("command", name, COMMANDS), 2)
    code: int = import_module(COMMANDS[name]).main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
