"""`espalier convert internvl | llava_video <release> <output>`: convert a release to a checkpoint of the library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from espalier.harness.errors import unknown_name
from espalier.harness.specs.commands import complain

#: Module of each release's format.
FORMATS = {
    "internvl": "espalier.harness.tools.convert.convert_internvl",
    "llava_video": "espalier.harness.tools.convert.convert_llava_video",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a release; exit code 2 and one line if its format is unknown."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: espalier convert {' | '.join(FORMATS)} <release> <output>")
        return 0
    name, *remaining = arguments
    if name not in FORMATS:
        return complain(unknown_name("format", name, FORMATS), 2)
    code: int = import_module(FORMATS[name]).main(remaining)
    return code
