"""`python run.py method=fastv ratio=0.9` is `espalier run method=fastv ratio=0.9` (harness/cli/run.py)."""

from __future__ import annotations

import sys

from espalier.harness.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
