"""The help of a command: its purpose, examples, and options."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from pathlib import Path
from typing import Any, NoReturn

from espalier.harness.errors import plain

#: Widest line of a help text.
WIDTH = 100


class PlainParser(argparse.ArgumentParser):
    """A parser with errors in which no argument can control a terminal, and paths that are not empty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with 2."""
        super().error(plain(message))


def _path(text: str) -> Path:
    """Return the path of an argument; an empty one, as of a variable that is not set, would be the working folder."""
    if not text:
        raise argparse.ArgumentTypeError(
            "'' is no path; valid: a name, or . for the working folder"
        )
    return Path(text)


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
