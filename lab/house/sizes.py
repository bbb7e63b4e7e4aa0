"""Sizes that may only fall: `python -m lab.house.sizes` prints them, `--check` fails above a ceiling (ceilings.json).

Statements and Python files of harness/, lab/ and tests/; words of pages written by hand; files that a FastV run enters
and own frames on the stack when its `plan` is called (run_path.py). A statement is one of `ast`, without imports and
docstrings, so that line breaks and docstrings neither help nor hurt.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lab.house import ceilings, run_path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("harness", "lab", "tests")


#: Tables in a page, and whole pages, that `make docs` writes.
TABLE = re.compile(r"<!-- [\w ]+ -->\n(?s:.*?)<!-- end -->")
PAGE = re.compile(r"# .*\n\n.*(make docs|--write)")


def statements(text: str) -> int:
    """Return the number of statements of a file."""
    return sum(map(_counts, ast.walk(ast.parse(text))))


def _counts(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return False
    return isinstance(node, ast.stmt)


def hand_written_words(root: Path = ROOT) -> int:
    """Return the number of words of the pages of docs/ that people write, without those of the log."""
    pages = [path for path in (root / "docs").rglob("*.md") if not path.stem.startswith("log")]
    texts = [path.read_text(encoding="utf-8") for path in pages if path.parent.name != "log"]
    return sum(len(TABLE.sub("", text).split()) for text in texts if not PAGE.match(text))


def measure(root: Path = ROOT) -> dict[str, float]:
    """Return statements and files by folder, and words. Cost: parses about 1,250 files, ten seconds."""
    sizes: dict[str, float] = {}
    for folder in FOLDERS:
        texts = [path.read_text(encoding="utf-8") for path in (root / folder).rglob("*.py")]
        sizes[f"{folder}_statements"] = sum(map(statements, texts))
        sizes[f"{folder}_files"] = len(texts)
    sizes["hand_written_words"] = hand_written_words(root)
    return sizes


def measure_run() -> dict[str, float]:
    """Return the files that a FastV run enters, and own frames at `plan`. Cost: a run under a profiler, a minute."""
    figures, _ = run_path.measure()
    return {name: figures[name] for name in ("files_entered", "own_frames_at_plan")}


def main(argv: Sequence[str] | None = None) -> int:
    """Print sizes; exit code 1 if `--check` finds one above its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m lab.house.sizes", description=__doc__)
    ceilings.add_options(parser)
    return ceilings.hold(measure() | measure_run(), parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
