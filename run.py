"""`python run.py method=fastv ratio=0.9` is `espalier run method=fastv ratio=0.9` (harness/cli/run.py)."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run; Ctrl-C while the program is still being imported is one line, too."""
    try:
        from espalier.harness.cli import run

        return run.main(argv)
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    from espalier.harness.runs.process import run_process

    run_process(main)
