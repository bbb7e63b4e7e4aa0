"""The help of a command: its purpose, examples, and options."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from typing import NoReturn

from espalier.harness.errors import plain

#: Widest line of a help text.
WIDTH = 100


class PlainParser(argparse.ArgumentParser):
    """A parser with errors in which no argument can control a terminal."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with 2."""
        super().error(plain(message))


def command_parser(name: str, about: str | None, *examples: str) -> argparse.ArgumentParser:
    """Return the parser of `espalier <name>`.

    Args:
        name: the command.
        about: its purpose; paragraphs are wrapped to the terminal.
        examples: arguments after the name.
    """
    typed = "\n".join(f"  espalier {name} {example}".rstrip() for example in examples)
    return PlainParser(
        prog=f"espalier {name}",
        description=wrapped(about or ""),
        epilog=f"examples:\n{typed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def wrapped(text: str) -> str:
    """Return a text with its paragraphs wrapped to the terminal."""
    width = min(WIDTH, shutil.get_terminal_size().columns - 2)
    return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.split("\n\n"))
