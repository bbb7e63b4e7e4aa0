"""Ceilings of measured figures: a figure of ceilings.json may fall, never rise."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

CEILINGS = Path(__file__).with_name("ceilings.json")
REMEDY = (
    "take as much away as is added, or raise the ceiling in a commit of its own that states why"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare `--check` and `--lower`."""
    parser.add_argument("--check", action="store_true", help="fail above a ceiling")
    parser.add_argument("--lower", action="store_true", help="write lower figures as ceilings")


def hold(figures: Mapping[str, float], options: argparse.Namespace, path: Path = CEILINGS) -> int:
    """Print figures and compare them with their ceilings, each of which `path` must have.

    Args:
        figures: values by the names that the ceilings have.
        options: parsed options of `add_options`.
        path: the file of ceilings; `--lower` changes only the entries of `figures`.

    Returns:
        The exit code: 1 if `--check` finds a figure above its ceiling.
    """
    print(json.dumps(figures))
    ceilings: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    above = [name for name, figure in figures.items() if figure > ceilings[name]]
    if options.lower:
        lowered = {name: min(figure, ceilings[name]) for name, figure in figures.items()}
        path.write_text(json.dumps(ceilings | lowered, indent=1) + "\n", encoding="utf-8")
    if not options.check:
        return 0
    for name in above:
        print(
            f"error: {name}={figures[name]:g} is above its ceiling; valid: at most {ceilings[name]:g} ({REMEDY})",
            file=sys.stderr,
        )
    return int(bool(above))
