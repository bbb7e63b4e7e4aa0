"""`python -m espalier <command> ...`: each command is the `main` of one module, which is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from espalier.harness.specs.commands import dispatch

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
    usage = f"usage: espalier <command> ...\ncommands: {', '.join(COMMANDS)}"
    return dispatch("command", COMMANDS, usage, argv)


if __name__ == "__main__":
    sys.exit(main())
