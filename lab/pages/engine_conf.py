"""conf/engine/default.yaml, written from `EngineSpec`: `python -m lab.pages.engine_conf [--write <file>]`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from textwrap import fill

import yaml

from espalier.harness.settings import defaults
from espalier.harness.specs.commands import command
from espalier.harness.specs.run_spec import EngineSpec
from lab.pages.page_writer import print_or_write

#: Letters of a line.
WIDTH = 120

HEAD = """\
# Dropped tokens are removed from the tensors: hidden states, masks and the cache get shorter.
# `make docs` writes this file from EngineSpec in harness/specs/run_spec.py.
"""


def config() -> str:
    """Return the file: a line for each setting with its default and what it means."""
    meanings = documented(EngineSpec)
    return HEAD + "".join(
        _line(key, value, meanings[key]) for key, value in defaults(EngineSpec).items()
    )


def documented(section: type) -> dict[str, str]:
    """Return the description of each attribute in the docstring of a dataclass."""
    listing = inspect.cleandoc(section.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"^ {4}(?=\w+: )", listing, flags=re.MULTILINE)[1:]
    pairs = (entry.partition(": ") for entry in entries)
    return {name: " ".join(text.split()) for name, _, text in pairs}


def _line(key: str, value: object, meaning: str) -> str:
    setting = yaml.safe_dump({key: value}).rstrip()
    line = f"{setting} # {meaning}"
    if len(line) <= WIDTH:
        return f"{line}\n"
    return fill(meaning, WIDTH, initial_indent="# ", subsequent_indent="# ") + f"\n{setting}\n"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the file."""
    return print_or_write(config, "lab.pages.engine_conf", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
