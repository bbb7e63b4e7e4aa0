"""`python -m harness.tables analytic [...]`: published tables, and what can be held against them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.tables import analytic


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that is named first; return its exit status, 2 for an unknown one."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["(none)"]
    if name != "analytic":
        print(f"error: command {name!r} is unknown; valid: analytic", file=sys.stderr)
        return 2
    return analytic.main(rest)


if __name__ == "__main__":
    sys.exit(main())
