"""`espalier convert <format> <release> <output>`: convert a release to a checkpoint of the library."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.harness.specs.commands import dispatch

#: Module of each release's format.
FORMATS = {
    "internvl": "espalier.harness.tools.convert.convert_internvl",
    "llava": "espalier.harness.tools.convert.convert_llava",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a release; exit code 2 and one line if its format is unknown."""
    usage = (
        f"usage: espalier convert {' | '.join(FORMATS)} <release> <output>\n\n"
        "example:\n  espalier convert internvl /models/InternVL2-8B /models/internvl2_8b"
    )
    return dispatch("format", FORMATS, usage, argv)
