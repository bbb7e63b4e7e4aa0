"""`python run.py method=fastv ratio=0.9` is `espalier run method=fastv ratio=0.9` (harness/cli/run.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run; Ctrl-C while the program is still being imported is one line, too.

    Without `argv` the command line is that of this process, which ends with the returned code.
    """
    try:
        from espalier.harness.cli import run
        from espalier.harness.specs.commands import run_process

        return run_process(run.main) if argv is None else run.main(argv)
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
